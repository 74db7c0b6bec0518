"""The order of use: which shards a training run reads, in which order, as a log in S3.

Written by the leader (naming.py), followed by every rank (intake.py) and by whoever resumes; the
entries are numbered without gaps and written once. A shard is named, with its hash and its samples'
lengths, before anybody trains on it, so that a place in training means the same samples to
everybody, for ever, and all ranks count the same microbatches without reading a sample. Two leaders
of one name agree by the entry's number: the loser takes over what stands. Invariant: no shard is
named twice. A shard that is refused after it was named keeps its place: its samples become padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.store import Store

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard to train on. The two lists run in step, one entry per sample."""

    key: str
    sha256: str  # of the object's bytes
    prompt_lens: list[int]  # tokens
    lengths: list[int]  # tokens, uncut; 0: never trained on


@dataclass(frozen=True, slots=True)
class RefusedShard:
    """A shard that nobody trains on."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class OrderEntry:
    """`train/<name>/order/<n>.json`."""

    schema: int
    number: int
    shards: list[NamedShard]
    refused: list[RefusedShard]
    num_shards: int  # named or refused so far, this entry's included
    finished: bool  # no further shard will come: later epochs may begin


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A named shard as the readers keep it: a million samples are eight megabytes."""

    key: str
    sha256: str
    prompt_lens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


@dataclass(slots=True)
class Found:
    """What an entry is to say."""

    shards: list[NamedShard] = field(default_factory=list)
    refused: list[RefusedShard] = field(default_factory=list)
    finished: bool = False

    def __bool__(self) -> bool:
        return bool(self.shards or self.refused or self.finished)


class Order:
    """One training run's log, as far as it has been read. Used from one thread."""

    def __init__(self, store: Store, run: str, name: str) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._name = name
        self._next = 0
        self.shards: list[Shard] = []
        self.refused: dict[str, str] = {}  # key -> reason
        self.known: set[str] = set()  # keys of all that was named or refused
        self.is_finished = False

    def follow(self) -> bool:
        """Read on; whether there was anything. Raises Corrupt, StoreUnavailable."""
        first = self._next
        while True:
            key = self._keys.order_entry(self._name, self._next)
            try:
                body = self._store.get(key)
            except Missing:
                return self._next > first
            entry = load(OrderEntry, body)
            if entry.schema != SCHEMA:
                raise BadInput(f"{key} has schema {entry.schema}, this is {SCHEMA}")
            self._take(entry)

    def append(self, found: Found) -> None:
        """Write what is not in the log yet. Safe to repeat, and in two processes at once."""
        while found := self._not_yet(found):
            entry = OrderEntry(
                schema=SCHEMA,
                number=self._next,
                shards=found.shards,
                refused=found.refused,
                num_shards=len(self.known | _keys_of(found)),
                finished=found.finished,
            )
            key = self._keys.order_entry(self._name, self._next)
            try:
                self._store.put_new(key, dump(entry))
                self._take(entry)
            except Conflict:  # another leader was first
                self.follow()

    def _not_yet(self, found: Found) -> Found:
        if self.is_finished:
            found = Found(refused=[r for r in found.refused if r.key in self.known])
        return Found(
            [shard for shard in found.shards if shard.key not in self.known],
            [refused for refused in found.refused if refused.key not in self.refused],
            found.finished and not self.is_finished,
        )

    def _take(self, entry: OrderEntry) -> None:
        self.shards += [_compact(shard) for shard in entry.shards]
        self.refused |= {refused.key: refused.reason for refused in entry.refused}
        self.known |= _keys_of(entry)
        self.is_finished |= entry.finished
        self._next = entry.number + 1


def _compact(shard: NamedShard) -> Shard:
    prompt_lens, lengths = _ints(shard.prompt_lens), _ints(shard.lengths)
    return Shard(shard.key, shard.sha256, prompt_lens, lengths)


def _ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _keys_of(entry: OrderEntry | Found) -> set[str]:
    return {shard.key for shard in entry.shards} | {refused.key for refused in entry.refused}
