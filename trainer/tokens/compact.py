"""Small shards -> large ones, for readers that would rather fetch few objects.

`dflash-fleet compact` calls it; reading.py follows what it wrote. A large shard holds whole small
ones, one after another, each checked while it is copied. What counts is the index object, written
once and last: it names a large shard and the keys that it stands for, so that a reader sees either
those or it. The small ones stay where they are: "done" still means that a batch's own shard exists.
Two that compact at once agree by the index's number; the loser removes what it made, which nobody
else can have named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import orjson
import uuid_utils

from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from trainer.tokens.reading import CompactIndex, list_small_shards, read_indexes
from trainer.tokens.shards import (
    PARTS,
    PROVENANCE,
    QUARANTINED,
    Provenance,
    Quarantined,
    new_file,
    read_provenance,
    read_quarantined,
    read_shard,
    read_table,
)

SHARD_BYTES = 256_000_000


@dataclass(slots=True)
class CompactReport:
    """What a call did."""

    num_compacted: int = 0  # small shards
    num_large: int = 0
    num_bytes: int = 0  # of the large ones
    num_left: int = 0  # small shards that don't fill a large one yet


@dataclass(slots=True)
class _Pile:
    """Small shards to be joined; they agree in everything but where they come from."""

    keys: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, key: str, body: bytes) -> None:
        self.keys.append(key)
        self.bodies.append(body)
        self.num_bytes += len(body)


def compact(
    store: Store,
    run: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    with_rest: bool = False,
    on_shard: Callable[[str], None] = lambda key: None,
) -> CompactReport:
    """Join what no large shard holds yet. Safe to repeat, and to run twice at once.

    `with_rest`: the last shards too, which fill no large one. Raises Corrupt where a shard is.
    """
    report = CompactReport()
    for pile in _piles(store, run, shard_bytes):
        if pile.num_bytes < shard_bytes and not with_rest:
            report.num_left += len(pile.keys)
            continue
        body = _joined(pile.bodies)
        key = RunKeys(run).compact(str(uuid_utils.uuid7()))
        store.put_new(key, body)
        if not _index(store, run, CompactIndex(key, pile.keys)):
            store.delete(key)
            return report  # another compacts these: its turn
        report.num_compacted += len(pile.keys)
        report.num_large += 1
        report.num_bytes += len(body)
        on_shard(key)
    return report


def _piles(store: Store, run: str, shard_bytes: int) -> Iterator[_Pile]:
    held = {key for index in read_indexes(store, run) for key in index.holds}
    open_piles: dict[bytes, _Pile] = {}
    for key in list_small_shards(store, run):
        if key in held:
            continue
        body = store.get(key)
        kind = _kind(read_provenance(body))
        pile = open_piles.setdefault(kind, _Pile())
        pile.add(key, body)
        if pile.num_bytes >= shard_bytes:
            yield open_piles.pop(kind)
    yield from open_piles.values()


def _kind(provenance: Provenance) -> bytes:
    """The same for shards that may be joined."""
    own = ("commit_key", "data_sha256", "skipped", "content_sha256")
    return orjson.dumps(
        {
            name: value
            for name, value in provenance.items()
            if name not in own and not name.startswith("num_")
        }
    )


def _joined(bodies: list[bytes]) -> bytes:
    """One shard of many; takes the bodies out of the list as it goes."""
    parts = [read_provenance(body) for body in bodies]
    metadata = {PROVENANCE: orjson.dumps(_total(parts)), PARTS: orjson.dumps(parts)}
    if quarantined := list(_all_quarantined(bodies)):
        metadata[QUARANTINED] = orjson.dumps(quarantined)
    with tempfile.TemporaryFile() as sink:
        with new_file(sink, metadata) as file:
            for at, body in enumerate(bodies):
                read_shard(body)  # checks it
                for batch in read_table(body).to_batches():
                    file.write_batch(batch.replace_schema_metadata(metadata))
                bodies[at] = b""
        sink.seek(0)
        return sink.read()


def _total(parts: list[Provenance]) -> Provenance:
    hashes = "".join(part["content_sha256"] for part in parts)
    total = parts[0].copy()
    total["commit_key"] = total["data_sha256"] = ""  # of many
    total["skipped"] = _sum(part["skipped"] for part in parts)
    total["num_samples"] = sum(part["num_samples"] for part in parts)
    total["num_tokens"] = sum(part["num_tokens"] for part in parts)
    total["num_loss_tokens"] = sum(part["num_loss_tokens"] for part in parts)
    total["content_sha256"] = sha256(hashes.encode()).hexdigest()
    return total


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total


def _all_quarantined(bodies: list[bytes]) -> Iterator[Quarantined]:
    for body in bodies:
        yield from read_quarantined(body)


def _index(store: Store, run: str, index: CompactIndex) -> bool:
    """Whether the index stands, and nobody else's has taken one of its shards."""
    for number in range(len(list(read_indexes(store, run))), 1_000_000):
        try:
            store.put_new(RunKeys(run).compact_index(number), orjson.dumps(index))
            return True
        except Conflict:
            taken = {key for other in read_indexes(store, run) for key in other.holds}
            if not taken.isdisjoint(index.holds):
                return False
    return False
