"""A run's samples, whether their shards were compacted or not.

Asked by online/samples.py and by whoever judges or shows samples. A compacted shard stands for the
small ones that its index names: a reader gets each sample once, from either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.store import Store

_SMALL = re.compile(r"/\d{6,}/[^/]+\.arrow$")


@dataclass(frozen=True, slots=True)
class CompactIndex:
    """`tokens/<version>/compact/<n>.json`: which shards a large one stands for."""

    key: str
    holds: list[str]  # keys, in the order of its parts


def list_shards(store: Store, run: str) -> list[str]:
    """Keys of the shards to read, in order: together they hold each sample once."""
    indexes = list(read_indexes(store, run))
    held = {key for index in indexes for key in index.holds}
    small = [key for key in list_small_shards(store, run) if key not in held]
    return [index.key for index in indexes] + small


def list_small_shards(store: Store, run: str) -> Iterator[str]:
    """Keys of the shards that were made of one commit each, in order."""
    for key, _size in store.list(RunKeys(run).tokens):
        if _SMALL.search(key):
            yield key


def read_indexes(store: Store, run: str) -> Iterator[CompactIndex]:
    """What was compacted, in the order of their numbers, which have no gaps. Raises Corrupt."""
    for number in count():
        try:
            yield load(CompactIndex, store.get(RunKeys(run).compact_index(number)))
        except Missing:
            return
