"""Features made and features kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.online.batches import Corpus, DataRecipe, MicroBatch, Place
from trainer.online.features import Features
from trainer.online.target import FrozenTarget, load_target
from trainer.tokens.shards import Sample


@pytest.fixture
def target(qwen_dir: Path) -> FrozenTarget:
    return load_target(str(qwen_dir), [1, 3], dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def batch(make_samples: Callable[..., list[Sample]]) -> MicroBatch:
    recipe = DataRecipe(batch_size=4, num_anchors=5, max_len=64)
    return next(Corpus(make_samples(30), recipe, seed=0).from_place(Place()))


@pytest.mark.parametrize("keep_mb", [0, 1])
def test_each_sample_gets_the_features_of_its_own_ids(
    target: FrozenTarget, batch: MicroBatch, keep_mb: int
) -> None:
    features = Features(target, keep_mb).of(batch)

    assert features.shape == (4, batch.ids_BL.shape[1], 64)
    for row, ids, length in zip(features, batch.ids_BL, batch.lengths_B.tolist(), strict=True):
        alone = target.features(ids[None, :length])[0]
        assert torch.allclose(row[:length], alone, rtol=1e-4, atol=1e-3)


def test_kept_features_are_not_made_again_and_have_the_same_bits(
    target: FrozenTarget, batch: MicroBatch
) -> None:
    features = Features(target, 1)
    first = features.of(batch)

    torch.nn.init.zeros_(target.model.get_input_embeddings().weight)

    assert torch.equal(features.of(batch), first)
    assert not torch.equal(Features(target, 1).of(batch), first)
