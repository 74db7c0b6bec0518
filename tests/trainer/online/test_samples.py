"""A run's samples, no more of them than were asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, samples_of
from trainer.online.samples import NUM_READERS, read_samples
from trainer.tokens.compact import compact

NUM_SHARDS = 20


@pytest.fixture
def run(store: Store) -> GrowingRun:
    """Twenty shards, one sample of each held out."""
    run = GrowingRun(store, NUM_SHARDS)
    for number in range(NUM_SHARDS):
        run.put(number, [replace(s, heldout=i == 3) for i, s in enumerate(samples_of(number))])
    return run


def test_no_more_shards_are_read_than_it_takes(
    run: GrowingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda self, key: read.append(key) or get(self, key))

    some = read_samples(run.store, run.spec.run, heldout=True, most=3)

    assert len(some) == 3 and all(s.heldout for s in some)
    assert len(read) == NUM_READERS < NUM_SHARDS


def test_all_come_where_they_are_few_and_the_same_ones_after_compaction(run: GrowingRun) -> None:
    some = read_samples(run.store, run.spec.run, heldout=True, most=5)

    compact(run.store, run.spec.run, with_rest=True)

    again = read_samples(run.store, run.spec.run, heldout=True, most=5)
    assert [s.id for s in again] == [s.id for s in some]
    everything = read_samples(run.store, run.spec.run, heldout=True)
    assert {s.id for s in everything} == {samples_of(n)[3].id for n in range(NUM_SHARDS)}
    assert {s.id for s in some} != {s.id for s in everything[:5]}
