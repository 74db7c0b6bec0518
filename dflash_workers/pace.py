"""How long the engine is waited for: fixed limits, and one learned from the answers before.

Read by engine and attempt. Whether an engine is alive is seen by its progress, word by word. Where
that can't be seen, before the first id and where nothing is streamed, an answer's limit is its
length at a slow pace: two hours for 32,000 ids, which are waited for only while other requests go
on. It must not end slow but living work, and so follows the pace that was seen: one stream of a
crowded CPU engine makes 1.4 ids/s, one on a GPU a hundred. So do the words: each costs as much to
read as all that was said before it, and one in ten seconds tells as much as ten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MIN_SEEN = 16  # answers before they count
_KEPT = 64
MIN_WORD_IDS = 64  # a minute and a half of a crowded CPU engine
_MAX_WORD_IDS = 512  # an engine that a few requests had to themselves may be full a moment later
_WORD_S = 10.0  # much shorter than what is taken for silence, in an engine twice as crowded too
_SLACK = 8.0  # a crowded batch, a long prefill and a queue inside the engine come on top


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is too long."""

    request_s: float = 60.0  # one request, however short its answer
    token_s: float = 0.25  # more per token it may generate, until the pace is known
    stall_s: float = 180.0  # no new id in any request: longer than the longest prefill
    lost_s: float = 900.0  # none in one that had begun: the engine may put it back for others
    away_s: float = 60.0  # no success for so long: give up
    backoff_s: float = 0.5  # doubled each time, with full jitter
    max_backoff_s: float = 8.0
    max_retry_after_s: float = 120.0  # what an engine may ask for
    abort_s: float = 1.0
    health_s: float = 25.0  # SGLang's own limit for its probe is 20


class Pace:
    """Seconds per id of the last answers."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self._median_s = 0.0  # of these; 0: too few

    def note(self, num_tokens: int, latency_s: float) -> None:
        """One answer's."""
        if num_tokens:
            self._seen.append(latency_s / num_tokens)
        if len(self._seen) >= _MIN_SEEN:
            self._median_s = sorted(self._seen)[len(self._seen) // 2]

    def word_ids(self) -> int:
        """How many ids should come in one event of an answer."""
        if not self._median_s:
            return MIN_WORD_IDS
        return min(max(MIN_WORD_IDS, int(_WORD_S / self._median_s)), _MAX_WORD_IDS)

    def limit_s(self, num_tokens: int) -> float:
        """For an answer of up to so many: at the configured pace, or at the one seen with slack,
        whichever is slower.
        """
        token_s = max(self._patience.token_s, _SLACK * self._median_s)
        return self._patience.request_s + token_s * num_tokens
