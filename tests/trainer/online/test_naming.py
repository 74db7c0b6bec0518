"""Which shards are named, and which never."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, samples_of
from tests.trainer.online.walking import Starved, follow, keys_of, once_each, taken
from trainer.gate import judge
from trainer.tokens.compact import compact
from trainer.tokens.shards import Sample

OF_SHARDS = ["unreadable", "tokenizer_mismatch"]  # rules that a bad shard fails


@pytest.fixture(autouse=True)
def low_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing run is judged from sixteen answers on."""
    monkeypatch.setattr(judge, "FIRST_SAMPLES", 16)
    monkeypatch.setattr(judge, "FIRST_SHARE", 0.0)


def full_run(store: Store, num_shards: int) -> GrowingRun:
    """Sealed, each batch with its shard."""
    run = GrowingRun(store, num_shards)
    for number in range(num_shards):
        run.put(number)
    run.seal()
    return run


def empty_answers(number: int) -> list[Sample]:
    """Data that fail the gate."""
    return [replace(s, ids=s.ids[: s.prompt_len + 2]) for s in samples_of(number)]


def test_held_out_samples_of_a_run_are_never_trained_on(store: Store) -> None:
    run = GrowingRun(store, 2)
    mixed = [replace(s, heldout=i % 2 == 0) for i, s in enumerate(samples_of(0))]
    run.put(0, mixed)
    run.put(1, samples_of(1))
    run.seal()

    walk = follow(run)
    batches = taken(walk, None)

    trained = {f"{s.prompt_key}:0" for s in [*mixed[1::2], *samples_of(1)]}
    assert set(keys_of(batches)) == trained


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ("tokenizer_sha256", "another tokenizer"),
        ("template_sha256", "another chat template"),
        ("target_fingerprint", "another target"),
    ],
)
def test_a_shard_made_for_another_target_is_refused_by_name_and_the_rest_trained_on(
    store: Store, fact: str, reason: str
) -> None:
    run = GrowingRun(store, 3)
    for number in range(2):
        run.put(number)
    run.put(2, None, **{fact: "x" * 64})
    run.seal()

    walk = follow(run, overrides=OF_SHARDS)
    batches = taken(walk, None)

    assert reason in walk.refused[run.key(2)]
    assert len(keys_of(batches)) == 16


def test_a_damaged_shard_and_a_quarantined_batch_do_not_stop_the_others(store: Store) -> None:
    run = GrowingRun(store, 4)
    for number in range(3):
        run.put(number)
    run.damage(1)
    run.quarantine(3)
    run.seal()

    walk = follow(run, overrides=OF_SHARDS)

    batches = taken(walk, None)
    assert list(walk.refused) == [run.key(1)]
    assert len(keys_of(batches)) == 16


def test_data_that_fail_the_gate_are_not_named(store: Store) -> None:
    run = GrowingRun(store, 3)
    for number in range(3):
        run.put(number, empty_answers(number))
    run.seal()
    walk = follow(run)

    for _ in range(2):
        with pytest.raises(NotEnough, match="failed the gate"):
            taken(walk, 1)
        assert not walk.shards


def test_a_run_that_turns_bad_while_it_grows_is_not_trained_on_any_further(store: Store) -> None:
    run = GrowingRun(store, 6)
    for number in range(3):
        run.put(number)
    walk = follow(run)
    taken(walk, 4)

    for number in range(3, 6):
        run.put(number, empty_answers(number))

    for _ in range(2):
        with pytest.raises(NotEnough, match="failed the gate"):
            walk.total_microbatches(1)
        assert len(walk.shards) == 3


def test_a_shard_that_is_damaged_while_the_run_grows_does_not_stop_training(store: Store) -> None:
    run = GrowingRun(store, 6)
    for number in range(3):
        run.put(number)
    walk = follow(run)
    taken(walk, 4)

    for number in range(3, 6):
        run.put(number)
    run.damage(4)
    run.seal()

    assert set(keys_of(taken(walk, None))) == set(
        once_each([s for n in (0, 1, 2, 3, 5) for s in samples_of(n)])
    )
    assert list(walk.refused) == [run.key(4)]


@pytest.mark.parametrize("overrides", [[], ["unreadable"]])
def test_many_bad_shards_stop_training_that_has_begun_unless_a_person_lets_them_pass(
    store: Store, overrides: list[str]
) -> None:
    run = GrowingRun(store, 8)
    for number in range(4):
        run.put(number)
    walk = follow(run, overrides=overrides)
    taken(walk, 4)

    for number in range(4, 8):
        run.put(number, None, template_sha256="x" * 64)
    run.seal()

    if overrides:
        assert len(keys_of(taken(walk, None))) == 4 * 8
        return
    for _ in range(2):
        with pytest.raises(NotEnough, match=r"4 of 8 shards.*another chat template"):
            taken(walk, None)


def test_shards_that_go_bad_after_they_were_named_stop_training_once_they_are_many(
    store: Store,
) -> None:
    run = full_run(store, 8)
    assert follow(run).total_microbatches(1) == 16
    for number in range(3):
        run.damage(number)
    walk = follow(run)
    assert len(keys_of(taken(walk, None))) == 5 * 8

    run.damage(3)

    with pytest.raises(NotEnough, match=r"4 of 8 shards.*sha256"):
        taken(follow(run), None)


def test_an_order_ends_only_with_every_planned_batch(store: Store) -> None:
    run = GrowingRun(store, 4)
    for number in range(3):
        run.put(number)
    walk = follow(run)
    assert walk.total_microbatches(1) is None
    run.seal()
    assert walk.total_microbatches(1) is None

    run.put(3)

    assert walk.total_microbatches(1) == 8


def test_a_cancelled_run_ends_with_what_was_committed(store: Store) -> None:
    run = GrowingRun(store, 4)
    for number in range(3):
        run.put(number)
        store.put_new(run.keys.commit(0, f"b{number:03d}"), b"")
    walk = follow(run)
    assert walk.total_microbatches(1) is None

    Control(store, run.spec.run).order(Action.CANCEL)

    assert walk.total_microbatches(1) == 6


def test_compaction_beside_training_makes_nothing_come_twice(store: Store) -> None:
    run = GrowingRun(store, 4)
    for number in range(2):
        run.put(number)
    walk = follow(run)
    taken(walk, 4)

    compact(store, run.spec.run, with_rest=True)
    run.put(2)
    run.put(3)
    compact(store, run.spec.run, with_rest=True)
    run.seal()

    wanted = once_each([s for n in range(4) for s in samples_of(n)])
    assert keys_of(taken(walk, None)) == wanted
    assert keys_of(taken(follow(run), None)) == wanted


def test_shards_that_are_there_at_once_come_in_no_order_of_the_plan(store: Store) -> None:
    run = full_run(store, 8)
    walk = follow(run)
    assert walk.total_microbatches(1) == 16

    follower = follow(run, is_leader=False)
    follower.is_finished()

    keys = [shard.key for shard in follower.shards]
    assert sorted(keys) == [run.key(n) for n in range(8)] != keys


def test_a_run_too_small_for_the_gate_waits_until_it_is_sealed(store: Store) -> None:
    run = GrowingRun(store, 1)
    run.put(0)
    walk = follow(run)
    for _ in range(3):
        with pytest.raises(Starved, match="gate"):
            taken(walk, 1)
    assert not walk.shards

    run.seal()

    assert len(taken(follow(run), None)) == 2
