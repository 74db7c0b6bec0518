"""What decides a row's outcome beside the row: how it is read, what it may ask, how it is drawn.

Made by intake.py from a call's options and the run; read by -> candidates.py. A line's digest takes
all of this in, so that a line counts as known only where its outcome would be the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson

from dflash_workers.contract.errors import BadInput
from producer.conversations import FINISHED, POLICIES
from producer.known import DIGEST_BYTES
from producer.limits import Limits
from producer.schemas import Shape

DUPLICATES = ("keep-first", "suffix", "error")
MAX_SAMPLES = 10_000  # of one row, all of which are in memory at once


@dataclass(frozen=True, slots=True)
class Draws:
    """How often a row is planned, and whether it is held out."""

    samples: int = 1  # of each row; the first has the row's id, the k-th after it "<id>#k"
    weights: Mapping[str, float] = field(default_factory=dict)  # path -> factor on its samples
    heldout_share: float = 0.0  # 0..1, unless the row says `heldout`

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise BadInput(f"samples must be from 1 to {MAX_SAMPLES}, not {self.samples}")
        if not 0 <= self.heldout_share <= 1:
            raise BadInput(f"heldout must be from 0 to 100 %, not {self.heldout_share:%}")
        for path, weight in self.weights.items():
            if not 0 <= weight * self.samples <= MAX_SAMPLES:
                raise BadInput(
                    f"{path}: a weight of {weight:g} is below 0 or makes too many samples"
                )

    def weight_of(self, source: str) -> float:
        """The weight of the file that a row stands in."""
        return self.weights.get(path_of(source), 1.0) if self.weights else 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides a row's outcome beside the row."""

    shape: Shape = field(default_factory=Shape)
    multi_turn: str = "rollout"  # see conversations.py
    limits: Limits = field(default_factory=Limits)
    draws: Draws = Draws()
    duplicates: str = "keep-first"  # of an id: its row again is dropped, renamed, or an error

    def __post_init__(self) -> None:
        if self.duplicates not in DUPLICATES:
            raise BadInput(f"duplicates: {self.duplicates!r} is none of {', '.join(DUPLICATES)}")
        if self.multi_turn not in (*POLICIES, FINISHED):
            raise BadInput(f"multi-turn: {self.multi_turn!r} is none of {', '.join(POLICIES)}")


class LineHash:
    """Digests of lines under the same rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # Where duplicates are renamed or forbidden, every row has to be seen.
        self.is_used = rules.duplicates == "keep-first"
        self._keys: dict[float, bytes] = {}  # by weight
        self._only_key = b"" if rules.draws.weights else self._key(1.0)

    def digests(self, lines: Sequence[bytes], source: str) -> list[bytes]:
        """Of each line of a file, over it and all that decides its outcome; empty where they are
        not used. `source` is that of any of the lines.
        """
        if not self.is_used:
            return [b""] * len(lines)
        key = self._only_key or self._key(self._rules.draws.weight_of(source))
        begun, digests = hashlib.sha256(key), []
        for line in lines:
            whole = begun.copy()  # takes less than to put key and line together
            whole.update(line)
            digests.append(whole.digest()[:DIGEST_BYTES])
        return digests

    def _key(self, weight: float) -> bytes:
        if (key := self._keys.get(weight)) is None:
            key = self._keys[weight] = _rules_key(self._rules, weight)
        return key


def path_of(source: str) -> str:
    """The file of a source such as "path:7" or "path#7"."""
    return source.rstrip("0123456789")[:-1]


def _rules_key(rules: Rules, weight: float) -> bytes:
    limits = replace(rules.limits, too_long=None)  # the run's own, and its target can't change
    draws = replace(rules.draws, weights={})
    facts = [replace(rules, limits=limits, draws=draws), weight, bool(rules.limits.too_long)]
    return hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).digest()
