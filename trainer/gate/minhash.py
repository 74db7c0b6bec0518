"""Near-duplicates among token sequences, in memory that does not grow with their number.

Fed by tally.py with each answer's ids; counts those that nearly repeat an earlier one. A signature
is 64 minima of hashed 5-grams, 8 bits of each kept; two answers share a minimum with a probability
equal to the Jaccard similarity of their sets of 5-grams. Four minima at a time make a key of 32
bits, under which an earlier answer is looked up; the whole signatures then decide. Every array is
made full size at the start: past MAX_KEPT different answers no more are kept, later ones are still
compared with those, and the count is a lower bound.

Minima: Broder, "On the resemblance and containment of documents" (1997). Few bits of each: Li and
Konig, "b-Bit Minwise Hashing" (2010), section 2. Keys by bands: Leskovec, Rajaraman and Ullman,
"Mining of Massive Datasets", section 3.4. Linear permutations: Bohman, Cooper and Frieze, "Min-wise
Independent Linear Permutations" (2000), over n-grams mixed as splitmix64 does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.tokens.shards import Ids

SHINGLE = 5  # ids of an n-gram: some three words
NUM_MINIMA = 64
SIMILAR = 0.8  # Jaccard similarity from which on two answers are near-duplicates
MAX_KEPT = 1 << 18  # different answers; with them everything here takes 48 MiB
_SLOT_BITS = 19  # two slots per answer
_MINIMUM_BITS = 8

_Words = npt.NDArray[np.uint64]
_Signature = npt.NDArray[np.uint8]

_RANDOM = np.random.default_rng(0)
_FACTORS = _RANDOM.integers(0, 1 << 31, (NUM_MINIMA, 1), dtype=np.uint32) * np.uint32(2)
_FACTORS += np.uint32(1)
_SUMMANDS = _RANDOM.integers(0, 1 << 32, (NUM_MINIMA, 1), dtype=np.uint32)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def signature(ids: Ids) -> _Signature:
    """Of the set of n-grams; fewer ids than one n-gram has count as one."""
    grams = _shingles(ids)
    # An odd factor and a summand permute the 32-bit words; the smallest image picks an n-gram.
    hashed = grams * _FACTORS
    hashed += _SUMMANDS
    minima = hashed.min(axis=1).astype(np.uint64)
    return (_mixed(minima) >> np.uint64(64 - _MINIMUM_BITS)).astype(np.uint8)


def similarity(one: _Signature, other: _Signature) -> float:
    """The estimate of the Jaccard similarity; its standard error is 0.06 at most."""
    by_chance = 1 / (1 << _MINIMUM_BITS)
    return max(0.0, (float((one == other).mean()) - by_chance) / (1 - by_chance))


class NearDuplicates:
    """Counts sequences that nearly repeat one seen before."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.num_seen = 0
        self.num_repeats = 0
        self._kept = np.full((max_kept, NUM_MINIMA), 0xFF, np.uint8)
        self._num_kept = 0
        # A slot names the last sequence put there. Another's in it hides one of 16 bands.
        self._slots = np.full((NUM_MINIMA // 4, 1 << _SLOT_BITS), -1, np.int32)
        self._bands = np.arange(NUM_MINIMA // 4)

    @property
    def is_full(self) -> bool:
        """Whether later sequences are no longer kept."""
        return self._num_kept == len(self._kept)

    def add(self, ids: Ids) -> bool:
        """Count one in; whether it repeats an earlier one."""
        self.num_seen += 1
        own = signature(ids)
        slots = self._slots_of(own)
        found = np.unique(self._slots[self._bands, slots])
        if any(similarity(own, self._kept[at]) >= SIMILAR for at in found if at >= 0):
            self.num_repeats += 1
            return True
        if not self.is_full:
            self._kept[self._num_kept] = own
            self._slots[self._bands, slots] = self._num_kept
            self._num_kept += 1
        return False

    def _slots_of(self, own: _Signature) -> npt.NDArray[np.int64]:
        keys = own.view(np.uint32).astype(np.uint64)
        return (_mixed(keys) >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def _shingles(ids: Ids) -> npt.NDArray[np.uint32]:
    """A hash of each n-gram."""
    words = ids.astype(np.uint64) + np.uint64(1)  # an id 0 counts, too
    size = min(SHINGLE, len(words))
    num_grams = len(words) - size + 1
    grams = np.zeros(num_grams, np.uint64)
    for at in range(size):
        grams = grams * _SPREAD + words[at : at + num_grams]
    return (_mixed(grams) >> np.uint64(32)).astype(np.uint32)


def _mixed(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit given."""
    words = words + _SPREAD
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
