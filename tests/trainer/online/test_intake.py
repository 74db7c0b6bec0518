"""A run that is trained on while it grows."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import replace

import pytest

from dflash_workers.contract.errors import StoreUnavailable
from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, samples_of
from tests.trainer.online.walking import (
    PACKED,
    PADDED,
    Starved,
    follow,
    keys_of,
    once_each,
    same,
    taken,
)
from trainer.gate import judge
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.intake import Intake
from trainer.tokens.shards import Sample

BOTH = pytest.mark.parametrize("recipe", [PADDED, PACKED], ids=["padded", "packed"])


@pytest.fixture(autouse=True)
def low_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing run is judged from sixteen answers on."""
    monkeypatch.setattr(judge, "FIRST_SAMPLES", 16)
    monkeypatch.setattr(judge, "FIRST_SHARE", 0.0)


@pytest.fixture
def finished(store: Store) -> GrowingRun:
    """Five shards of eight samples, sealed."""
    run = GrowingRun(store, 5)
    for number in range(5):
        run.put(number)
    run.seal()
    return run


@BOTH
def test_a_finished_run_gives_each_sample_once_an_epoch_for_two_epochs(
    finished: GrowingRun, recipe: DataRecipe
) -> None:
    walk = follow(finished, recipe)
    num, twice = walk.total_microbatches(1), walk.total_microbatches(2)
    assert num is not None and twice is not None

    batches = taken(walk, twice)

    wanted = once_each([s for n in range(5) for s in samples_of(n)])
    assert keys_of(batches[:num]) == keys_of(batches[num:]) == wanted
    ids = {f"{s.prompt_key}:0": s.ids.tolist() for n in range(5) for s in samples_of(n)}
    for batch in batches:
        for row, placed in enumerate(batch.samples):
            for s in placed:
                assert batch.ids_BL[row, s.start : s.start + s.length].tolist() == ids[s.key]


@BOTH
def test_another_trainer_goes_on_at_any_place_with_the_same_bits(
    finished: GrowingRun, recipe: DataRecipe
) -> None:
    first = follow(finished, recipe)
    total = first.total_microbatches(2)
    assert total is not None
    unbroken = taken(first, total)

    for done in (1, total // 2 - 1, total // 2, total - 2):
        rest = taken(follow(finished, recipe), total - done, unbroken[done - 1].after)
        assert all(same(a, b) for a, b in zip(unbroken[done:], rest, strict=True))


def test_what_is_skipped_is_not_read(finished: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(PADDED, buffer_rows=8)
    unbroken = taken(follow(finished, recipe), 11)
    walk = follow(finished, recipe)
    read: list[str] = []
    get = Store.get

    def noting(store: Store, key: str) -> bytes:
        read.append(key)
        return get(store, key)

    monkeypatch.setattr(Store, "get", noting)

    batches = list(itertools.islice(walk.microbatches(Place(), mine=lambda g: g == 7), 1))

    assert same(batches[0], unbroken[7])
    assert sum(key.endswith(".arrow") for key in read) == 1


def num_samples() -> int:
    """In this process' memory."""
    gc.collect()
    return sum(type(thing) is Sample for thing in gc.get_objects())


def test_memory_holds_the_samples_of_a_window_and_not_of_the_run(store: Store) -> None:
    run = GrowingRun(store, 12)
    for number in range(12):
        run.put(number)
    run.seal()
    walk = follow(run)
    before, most = num_samples(), 0  # of other tests

    for batch in walk.microbatches(Place(), mine=lambda g: g % 8 == 7):
        most = max(most, num_samples() - before)
        if batch.number == 23:  # the last one of the epoch
            break

    assert 0 < most <= 3 * 8  # a window of sixteen samples lies in two or three shards


@BOTH
def test_a_trainer_ahead_of_the_generator_waits_and_says_so_and_then_goes_on(
    store: Store, recipe: DataRecipe
) -> None:
    run = GrowingRun(store, 4)
    run.put(0)
    coming = iter([lambda: run.put(1), lambda: run.put(2), lambda: run.put(3), run.seal])
    waits: list[str] = []

    def on_wait(waited_s: float, lacks: str) -> None:
        waits.append(lacks)
        next(coming)()

    walk = follow(run, recipe, on_wait=on_wait)
    batches = list(
        itertools.takewhile(
            lambda b: b.number < (walk.total_microbatches(1) or 99),
            walk.microbatches(Place(), mine=lambda g: True),
        )
    )

    assert keys_of(batches) == once_each([s for n in range(4) for s in samples_of(n)])
    assert "gate" in waits[0]
    assert "seal" in waits[2]
    assert walk.starved_s > 0
    again = taken(follow(run, recipe), len(batches))
    assert all(same(a, b) for a, b in zip(batches, again, strict=True))


def test_a_follower_walks_as_the_leader_does(finished: GrowingRun) -> None:
    follower = follow(finished, PADDED, is_leader=False)
    with pytest.raises(Starved, match="leader"):
        taken(follower, 1)

    leads = taken(follow(finished, PADDED), 12)

    assert all(same(a, b) for a, b in zip(leads, taken(follower, 12), strict=True))


def test_a_shard_that_changed_after_it_was_named_becomes_padding_and_moves_no_number(
    finished: GrowingRun,
) -> None:
    before = taken(follow(finished, PACKED), 6)
    finished.damage(2)

    walk = follow(finished, PACKED)
    after = taken(walk, 6)

    lost = {f"{s.prompt_key}:0" for s in samples_of(2)}
    assert [b.number for b in after] == [b.number for b in before]
    assert set(keys_of(after)) == set(keys_of(before)) - lost
    assert "sha256" in walk.refused[finished.key(2)]
    assert "sha256" in follow_until_read(finished).refused[finished.key(2)]


def test_a_store_that_is_away_is_waited_for(
    finished: GrowingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = taken(follow(finished, PADDED), 3)
    get, failures, waits = Store.get, itertools.count(), []

    def flaky(store: Store, key: str) -> bytes:
        if next(failures) % 3 == 1:
            raise StoreUnavailable("S3 is away")
        return get(store, key)

    walk = follow(finished, PADDED, on_wait=lambda waited_s, lacks: waits.append(lacks))
    monkeypatch.setattr(Store, "get", flaky)

    assert all(same(a, b) for a, b in zip(wanted, taken(walk, 3), strict=True))
    assert set(waits) == {"S3 is away"}


def test_a_walk_that_is_closed_while_it_waits_ends(store: Store) -> None:
    run = GrowingRun(store, 3)
    run.put(0)
    waiting = threading.Event()
    walk = follow(run, PADDED, on_wait=lambda waited_s, lacks: waiting.set())
    got: list[list[MicroBatch]] = []
    thread = threading.Thread(target=lambda: got.append(taken(walk, 1)))
    thread.start()
    assert waiting.wait(20)

    walk.close()
    thread.join(20)

    assert got == [[]]


def follow_until_read(run: GrowingRun) -> Intake:
    """A follower that has read all of the log."""
    walk = follow(run, PACKED, is_leader=False)
    assert walk.is_finished()
    return walk
