"""The lines that a plan has had: what makes planning a file for the second time fast.

Filled by segments.py from the log, asked by candidates.py in every reading process. Kept are 64
bits of each digest, sorted, 8 bytes in all, which processes share: of a hundred million lines
known and as many new ones, the chance that any is mistaken for another is one in 1,800.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable


class KnownLines:
    """Digests of lines."""

    def __init__(self, halves: Iterable[int] = ()) -> None:
        self._halves = array("Q", sorted(halves))

    def __len__(self) -> int:
        return len(self._halves)

    def __contains__(self, digest: bytes) -> bool:
        half = int.from_bytes(digest[:8])
        at = bisect_left(self._halves, half)
        return at < len(self._halves) and self._halves[at] == half


NO_LINES = KnownLines()


def high_halves(digests: Iterable[str]) -> array[int]:
    """The first 64 bits of digests of 32 hex digits; an empty one is left out."""
    words = array("Q", bytes.fromhex("".join(digests)))
    if sys.byteorder == "little":
        words.byteswap()
    return words[::2]
