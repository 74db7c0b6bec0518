"""Some samples of a run, or all of a small one, in memory at once.

Read by trainer/heldout.py and by whoever measures; training on a run of any size goes through
intake.py. Shards are read until there are enough, in the order of their names' hashes, which says
nothing of what they hold. Invariant: of a run that is done, the same call gives the same samples,
whether its shards were compacted or not, and memory holds no more than were asked for and a few
shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from dflash_workers.contract.store import Store
from trainer.tokens.reading import list_small_shards
from trainer.tokens.shards import Sample, read_shard

MOST = 4096  # samples: some 8 million tokens
NUM_READERS = 8


def read_samples(store: Store, run: str, *, heldout: bool, most: int = MOST) -> list[Sample]:
    """At most so many samples that are (not) held out, in a fixed order. Raises Corrupt."""
    found = islice(_samples(store, run, heldout), most)
    return sorted(found, key=lambda sample: (sample.prompt_key, sample.turn))


def _samples(store: Store, run: str, heldout: bool) -> Iterator[Sample]:
    def read(key: str) -> list[Sample]:
        return [s for s in read_shard(store.get(key)) if s.heldout == heldout]

    keys = sorted(list_small_shards(store, run), key=_hash)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for at in range(0, len(keys), NUM_READERS):  # whoever has enough reads no further
            yield from chain.from_iterable(readers.map(read, keys[at : at + NUM_READERS]))


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode()).digest()
