"""Which samples come, in which microbatch, and that a stop changes nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from dflash_workers.contract.errors import BadInput, Conflict, NotEnough
from tests.trainer.online.walking import PACKED, PADDED, keys_of, same, taken
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.intake import ListIntake
from trainer.tokens.shards import Sample

BOTH = pytest.mark.parametrize("recipe", [PADDED, PACKED], ids=["padded", "packed"])
MakeSamples = Callable[..., list[Sample]]


@BOTH
def test_an_epoch_has_every_sample_once_and_each_epoch_its_own_order(
    make_samples: MakeSamples, recipe: DataRecipe
) -> None:
    walk = ListIntake(make_samples(30), recipe, 0)
    num = walk.total_microbatches(1)
    assert num is not None

    batches = taken(walk, 2 * num)

    first, second = batches[:num], batches[num:]
    assert walk.total_microbatches(2) == 2 * num
    assert keys_of(first) == keys_of(second)
    assert set(keys_of(first).values()) == {1}
    assert len(keys_of(first)) == 30
    assert [b.samples for b in first] != [b.samples for b in second]
    assert [b.number for b in batches] == list(range(2 * num))


@BOTH
def test_training_goes_on_at_any_place_as_if_never_stopped(
    make_samples: MakeSamples, recipe: DataRecipe
) -> None:
    samples = make_samples(30)
    unbroken = taken(ListIntake(samples, recipe, 0), 20)

    for done in (1, 7, 8, 9, 15):
        rest = taken(ListIntake(samples, recipe, 0), 20 - done, unbroken[done - 1].after)
        assert all(same(a, b) for a, b in zip(unbroken[done:], rest, strict=True))


def test_ranks_share_the_microbatches_by_number(make_samples: MakeSamples) -> None:
    walk = ListIntake(make_samples(30), PADDED, 0)

    def of_rank(rank: int) -> list[MicroBatch]:
        mine = walk.microbatches(Place(), mine=lambda g: g % 3 == rank)
        return list(itertools.islice(mine, 6))

    together = sorted(itertools.chain(*map(of_rank, range(3))), key=lambda batch: batch.number)
    assert all(same(a, b) for a, b in zip(together, taken(walk, 18), strict=True))


def test_a_long_sample_is_cut_and_one_whose_loss_does_not_fit_is_left_out(
    make_samples: MakeSamples,
) -> None:
    samples = make_samples(30, answer_len=40)

    walk = ListIntake(samples, replace(PADDED, max_len=12), 0)
    batches = taken(walk, None)

    fitting = {f"{s.prompt_key}:0" for s in samples if s.prompt_len <= 10}
    assert set(keys_of(batches)) == fitting
    assert max(s.length for b in batches for row in b.samples for s in row) == 12


def test_samples_without_loss_are_left_out(make_samples: MakeSamples) -> None:
    samples = make_samples(12)
    samples[3] = replace(samples[3], ids=samples[3].ids[: samples[3].prompt_len])
    samples[4] = replace(samples[4], ids=samples[4].ids[: samples[4].prompt_len + 1])

    walk = ListIntake(samples, PADDED, 0)

    kept = keys_of(taken(walk, None))
    assert set(kept) == {f"{s.prompt_key}:0" for s in samples[:3] + samples[5:]}


def test_held_out_samples_are_never_trained_on(make_samples: MakeSamples) -> None:
    with pytest.raises(BadInput, match="held out"):
        ListIntake(make_samples(30) + make_samples(1, heldout=True), PADDED, 0)


def test_few_samples_and_none_are_refused(make_samples: MakeSamples) -> None:
    for num in (0, 7):
        with pytest.raises(NotEnough, match="tokenize"):
            ListIntake(make_samples(num), PADDED, 0)
    assert ListIntake(make_samples(8), PADDED, 0).total_microbatches(1) == 2


def test_a_place_of_another_seed_is_refused(make_samples: MakeSamples) -> None:
    walk = ListIntake(make_samples(30), PADDED, 0)

    with pytest.raises(Conflict, match="seed"):
        taken(walk, 1, Place(seed=1))


def test_the_digest_knows_samples_and_the_length_that_counts(make_samples: MakeSamples) -> None:
    samples = make_samples(30)

    digest = ListIntake(samples, PADDED, 0).digest()

    assert digest == ListIntake(samples, PADDED, 1).digest()
    assert digest != ListIntake(samples[1:], PADDED, 0).digest()
    assert digest != ListIntake(samples, replace(PADDED, max_len=20), 0).digest()


def test_a_walk_that_passes_over_everything_ends_when_it_is_closed(
    make_samples: MakeSamples,
) -> None:
    walk = ListIntake(make_samples(30), PADDED, 0)
    asked = threading.Event()

    def never(number: int) -> bool:
        asked.set()
        return False

    thread = threading.Thread(target=lambda: list(walk.microbatches(Place(), mine=never)))
    thread.start()
    assert asked.wait(20)

    walk.close()
    thread.join(20)

    assert not thread.is_alive()
