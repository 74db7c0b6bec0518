"""The answers that occur most often, in memory that does not grow with their number.

Fed by tally.py. Lossy counting (Manku and Motwani, "Approximate Frequency Counts over Data
Streams", VLDB 2002): after every WIDTH answers those that can't be frequent are forgotten. A count
is never too high, and too low by one in WIDTH answers at most.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

WIDTH = 4096  # answers between two clearings


@dataclass(slots=True)
class Repeat:
    """One answer and how often it was seen."""

    text: str  # as it was given first, for people
    count: int
    forgotten: int  # occurrences that may have been missed, at most


class Repeats:
    """Counts equal answers."""

    def __init__(self, width: int = WIDTH) -> None:
        self.num_seen = 0
        self._width = width
        self._kept: dict[bytes, Repeat] = {}

    def add(self, answer: bytes, text: str) -> None:
        """Count one in. `text` stands for it in reports."""
        key = hashlib.blake2b(answer, digest_size=16).digest()
        bucket = self.num_seen // self._width
        self.num_seen += 1
        if key in self._kept:
            self._kept[key].count += 1
        else:
            self._kept[key] = Repeat(text, 1, bucket)
        if self.num_seen % self._width == 0:
            self._clear(bucket + 1)

    def top(self, num: int) -> list[Repeat]:
        """The most frequent ones that were seen more than once, most frequent first."""
        often = [r for r in self._kept.values() if r.count > 1]
        return sorted(often, key=lambda r: (-r.count, r.text))[:num]

    def _clear(self, bucket: int) -> None:
        self._kept = {k: r for k, r in self._kept.items() if r.count + r.forgotten > bucket}
