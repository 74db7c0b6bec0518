"""What each planned prompt asks, by its key: this tells a repetition from a conflict.

Filled by segments.py from the log, asked and added to by plan.py and dedup.py. A call that finds
all its lines known asks nothing of this, so that what the log lists is unpacked only when somebody
asks first: 24 bytes a prompt until then, 140 afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from producer.known import high_halves, words_of

_CONTENT_SHIFT = 4  # 60 bits of 64: an int keeps them in 32 bytes


class Contents:
    """Content of prompts by key, both as ints, the smallest form that they have."""

    def __init__(self) -> None:
        self._by_key: dict[int, int] = {}
        self._keys = array("Q")  # not unpacked yet: a key's high half, its low half
        self._halves = array("Q")  # of these keys' content digests

    def add(self, keys: Sequence[str], content_digests: Sequence[str]) -> None:
        """Take in prompts of the log, in step; both are 32 hex digits."""
        self._keys += words_of(keys)
        self._halves += high_halves(content_digests)

    def by_key(self) -> dict[int, int]:
        """All of them; always the same dict, which may be added to."""
        if self._keys:
            highs, lows = self._keys[::2], self._keys[1::2]
            keys = (high << 64 | low for high, low in zip(highs, lows, strict=True))
            contents = (half >> _CONTENT_SHIFT for half in self._halves)
            self._by_key.update(zip(keys, contents, strict=True))
            del self._keys[:], self._halves[:]
        return self._by_key


def content_of(content_digest: str) -> int:
    """60 bits of the digest, as they are kept here. For equal keys, and for dedup.py."""
    return int(content_digest[:15], 16)
