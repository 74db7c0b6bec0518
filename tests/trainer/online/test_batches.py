"""Which samples come, when, and which never."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from trainer.online.batches import Corpus, DataRecipe, MicroBatch, Place, read_samples
from trainer.tokens.shards import Sample, Source, write_shard

RECIPE = DataRecipe(batch_size=4, num_anchors=5, max_len=64)
MakeSamples = Callable[..., list[Sample]]


def same(one: MicroBatch, other: MicroBatch) -> bool:
    return (
        torch.equal(one.ids_BL, other.ids_BL)
        and torch.equal(one.anchors_BA, other.anchors_BA)
        and one.after == other.after
    )


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(make_samples: MakeSamples) -> None:
    corpus = Corpus(make_samples(30), RECIPE, seed=0)

    orders = [list(itertools.chain(*corpus.epoch_order(epoch))) for epoch in (0, 1)]

    assert Counter(orders[0]) == Counter(orders[1]) == Counter(range(30))
    assert orders[0] != orders[1]


def test_training_goes_on_at_any_place_as_if_never_stopped(make_samples: MakeSamples) -> None:
    samples = make_samples(30)
    unbroken = list(itertools.islice(Corpus(samples, RECIPE, seed=0).from_place(Place()), 20))

    for done in (1, 7, 8, 9, 15):
        rest = Corpus(samples, RECIPE, seed=0).from_place(unbroken[done - 1].after)
        assert all(same(a, b) for a, b in zip(unbroken[done:], rest, strict=False))


def test_a_microbatch_holds_its_samples_ids_and_little_padding(make_samples: MakeSamples) -> None:
    samples = make_samples(30)
    rows = {tuple(s.ids.tolist()) for s in samples}

    batches = list(itertools.islice(Corpus(samples, RECIPE, seed=0).from_place(Place()), 8))

    for batch in batches:
        assert batch.ids_BL.shape[1] % RECIPE.pad_multiple == 0
        assert batch.ids_BL.shape[1] - int(batch.lengths_B.max()) < RECIPE.pad_multiple
        for ids, length in zip(batch.ids_BL, batch.lengths_B, strict=True):
            assert tuple(ids[: int(length)].tolist()) in rows
    assert sum(len(b.ids_BL) for b in batches) == 30


def test_a_long_sample_is_cut_and_a_long_prompt_left_out(make_samples: MakeSamples) -> None:
    samples = make_samples(30, answer_len=40)
    recipe = DataRecipe(batch_size=4, num_anchors=5, max_len=12)

    corpus = Corpus(samples, recipe, seed=0)

    assert {s.id for s in corpus.samples} == {s.id for s in samples if s.prompt_len <= 10}
    batch = next(corpus.from_place(Place()))
    assert int(batch.lengths_B.max()) == 12
    assert int(batch.anchors_BA.max()) <= 10  # the token after it is there too


def test_held_out_samples_are_never_trained_on(make_samples: MakeSamples) -> None:
    with pytest.raises(BadInput, match="held out"):
        Corpus(make_samples(30) + make_samples(1, heldout=True), RECIPE, seed=0)


def test_few_samples_and_none_are_refused(make_samples: MakeSamples) -> None:
    with pytest.raises(NotEnough, match="tokenize"):
        Corpus([], RECIPE, seed=0)
    with pytest.raises(NotEnough, match="tokenize"):
        Corpus(make_samples(7), RECIPE, seed=0)
    assert len(Corpus(make_samples(8), RECIPE, seed=0).samples) == 8


def test_the_digest_knows_samples_and_the_length_that_counts(make_samples: MakeSamples) -> None:
    samples = make_samples(30)
    shorter = DataRecipe(batch_size=4, num_anchors=5, max_len=20)

    digest = Corpus(samples, RECIPE, seed=0).digest()

    assert digest == Corpus(samples, RECIPE, seed=1).digest()
    assert digest != Corpus(samples[1:], RECIPE, seed=0).digest()
    assert digest != Corpus(samples, shorter, seed=0).digest()


def test_shards_are_read_in_an_order_that_does_not_depend_on_their_names(
    store: Store, make_samples: MakeSamples
) -> None:
    samples, heldout = make_samples(6), make_samples(2, heldout=True)
    source = Source(
        road="ids",
        run="r",
        commit_key="c",
        data_sha256="",
        target_fingerprint="",
        tokenizer_sha256="",
        template_sha256="",
        vocab_size=512,
        stop_token_ids=[],
        tool_version="",
        skipped={},
    )
    keys = RunKeys("r")
    store.put_new(keys.shard(0, "a"), write_shard([*samples[3:], *heldout], source))
    store.put_new(keys.shard(0, "b"), write_shard(samples[:3], source))

    read = read_samples(store, "r", heldout=False)

    assert [s.id for s in read] == [s.id for s in samples]
    assert len(read_samples(store, "r", heldout=True)) == 2
