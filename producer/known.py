"""The lines that a plan has had: what makes planning a file for the second time fast.

Filled by segments.py from the log, asked by candidates.py in every reading process. Kept are 64
bits of each digest, sorted, 8 bytes in all, which processes share: of a hundred million lines
known and as many new ones, the chance that any is mistaken for another is one in 1,800.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

DIGEST_BYTES = 16  # of a line


class KnownLines:
    """Digests of lines."""

    def __init__(self, halves: Sequence[int] = ()) -> None:
        self._halves = np.sort(np.array(halves, np.uint64))

    def __len__(self) -> int:
        return len(self._halves)

    def __contains__(self, digest: bytes) -> bool:
        return self.which([digest])[0]

    def which(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each is known: of many at once, each takes a tenth of the time."""
        if not len(self._halves):
            return [False] * len(digests)
        asked = np.frombuffer(b"".join(digests), ">u8")[:: DIGEST_BYTES // 8].astype(np.uint64)
        at = self._halves.searchsorted(asked)
        are_known: list[bool] = (self._halves.take(at, mode="clip") == asked).tolist()
        return are_known


NO_LINES = KnownLines()


def high_halves(digests: Iterable[str]) -> array[int]:
    """The first 64 bits of digests of 32 hex digits; an empty one is left out."""
    return words_of(digests)[::2]


def words_of(digests: Iterable[str]) -> array[int]:
    """Digests of 32 hex digits as two times 64 bits each; an empty one is left out."""
    words = array("Q", bytes.fromhex("".join(digests)))
    if sys.byteorder == "little":
        words.byteswap()
    return words
