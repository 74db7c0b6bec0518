"""Large shards hold what the small ones held, once, whoever compacts at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import orjson
import pyarrow as pa
import pytest

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from trainer.tokens.compact import compact
from trainer.tokens.reading import CompactIndex, list_shards
from trainer.tokens.shards import (
    Quarantined,
    Sample,
    Source,
    read_parts,
    read_provenance,
    read_quarantined,
    read_shard,
    write_shard,
)

RUN = "run"
KEYS = RunKeys(RUN)
STOP = 2
SMALL_BYTES = 5000  # of a shard below, about


def small_shard(number: int, road: str = "ids") -> bytes:
    source = Source(
        road=road,
        run=RUN,
        commit_key=KEYS.commit(1, f"b{number:02d}"),
        data_sha256="d" * 64,
        target_fingerprint="f" * 64,
        tokenizer_sha256="t" * 64,
        template_sha256="c" * 64,
        vocab_size=1000,
        stop_token_ids=[STOP],
        tool_version="0",
        skipped={"empty": 1},
    )
    draw = np.random.default_rng(number)
    samples = []
    for n in range(3):
        ids = draw.integers(3, 1000, 400).astype(np.int32)
        ids[-1] = STOP
        key = f"{number:02d}{n}".ljust(32, "0")
        samples.append(Sample(key, f"s{number}-{n}", 0, ids, 5, -1, False, "stop"))
    left_out = [Quarantined(id=f"q{number}", reason="boundary", detail="")] if number == 2 else []
    return write_shard(samples, source, left_out)


@pytest.fixture
def filled(store: Store) -> Store:
    for number in range(8):
        store.put_new(KEYS.shard(1, f"b{number:02d}"), small_shard(number))
    return store


def names(store: Store) -> list[str]:
    shards = (read_shard(store.get(key)) for key in list_shards(store, RUN))
    return [sample.id for sample in sorted(chain(*shards), key=lambda sample: sample.id)]


def test_a_reader_finds_the_same_samples_in_fewer_objects(filled: Store) -> None:
    before = names(filled)

    report = compact(filled, RUN, shard_bytes=3 * SMALL_BYTES)

    assert (report.num_compacted, report.num_large, report.num_left) == (6, 2, 2)
    keys = list_shards(filled, RUN)
    assert len(keys) == 4
    assert keys[2:] == [KEYS.shard(1, "b06"), KEYS.shard(1, "b07")]
    assert names(filled) == before
    assert filled.exists(KEYS.shard(1, "b00"))  # "done" is asked of these


def test_a_large_shard_is_a_shard_and_says_where_its_parts_come_from(filled: Store) -> None:
    compact(filled, RUN, shard_bytes=3 * SMALL_BYTES)

    body = filled.get(list_shards(filled, RUN)[0])

    table = pa.ipc.open_file(body).read_all()
    assert table.num_rows == len(read_shard(body)) == 9
    parts = read_parts(body)
    assert parts == [read_provenance(small_shard(number)) for number in (0, 1, 2)]
    total = read_provenance(body)
    assert total["num_samples"] == 9
    assert total["num_tokens"] == 9 * 400 == sum(len(ids) for ids in table["input_ids"])
    assert total["skipped"] == {"empty": 3}
    assert [q["id"] for q in read_quarantined(body)] == ["q2"]


def test_the_rest_is_compacted_when_asked_for_and_nothing_twice(filled: Store) -> None:
    compact(filled, RUN, shard_bytes=3 * SMALL_BYTES)
    rest = compact(filled, RUN, shard_bytes=3 * SMALL_BYTES, with_rest=True)
    again = compact(filled, RUN, shard_bytes=3 * SMALL_BYTES, with_rest=True)

    assert (rest.num_compacted, rest.num_large, again.num_compacted) == (2, 1, 0)
    assert len(names(filled)) == len(set(names(filled))) == 24


def test_shards_of_two_roads_are_not_mixed(store: Store) -> None:
    for number in range(4):
        road = "ids" if number % 2 else "text"
        store.put_new(KEYS.shard(1, f"b{number:02d}"), small_shard(number, road))

    report = compact(store, RUN, with_rest=True)

    assert report.num_large == 2
    roads = [read_provenance(store.get(key))["road"] for key in list_shards(store, RUN)]
    assert sorted(roads) == ["ids", "text"]


@dataclass(frozen=True)
class RacingStore(Store):
    """Another compacts the same shards while we write ours."""

    def put_new(self, key: str, body: bytes) -> None:
        if key.endswith("compact/000000.json"):
            theirs = CompactIndex("their.arrow", [KEYS.shard(1, "b01")])
            Store.put_new(self, key, orjson.dumps(theirs))
        Store.put_new(self, key, body)


def test_of_two_that_compact_at_once_one_wins_and_the_other_leaves_nothing(filled: Store) -> None:
    racing = RacingStore(filled.client, filled.bucket, filled.prefix, filled.endpoint)

    report = compact(racing, RUN, shard_bytes=3 * SMALL_BYTES)

    assert report.num_large == 0
    left = [key for key, _ in filled.list(KEYS.all_compact)]
    assert left == [KEYS.compact_index(0)]


def test_a_crash_before_the_index_changes_nothing_for_readers(filled: Store) -> None:
    before = names(filled)
    filled.put_new(KEYS.compact("0190-orphan"), b"half done")

    assert names(filled) == before


def test_a_damaged_shard_stops_it_and_is_named(filled: Store) -> None:
    body = bytearray(filled.get(KEYS.shard(1, "b01")))
    body[len(body) // 2] ^= 1
    filled.replace(KEYS.shard(1, "b01"), bytes(body))

    with pytest.raises(Corrupt):
        compact(filled, RUN, with_rest=True)
    assert not filled.exists(KEYS.compact_index(0))
