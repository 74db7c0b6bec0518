"""Features made and features kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.trainer.conftest import SIZES
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.features import Features
from trainer.online.intake import ListIntake
from trainer.online.target import FrozenTarget, load_target
from trainer.tokens.shards import Sample


def open_target(folder: Path) -> FrozenTarget:
    return load_target(str(folder), [1, 3], dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def target(qwen_dir: Path) -> FrozenTarget:
    return open_target(qwen_dir)


@pytest.fixture
def batch(make_samples: Callable[..., list[Sample]]) -> MicroBatch:
    recipe = DataRecipe(batch_size=4, num_anchors=5, max_len=64)
    return next(ListIntake(make_samples(30), recipe, 0).microbatches(Place(), mine=lambda g: True))


@pytest.fixture
def packed_batch(make_samples: Callable[..., list[Sample]]) -> MicroBatch:
    """Two rows of several documents, with padding behind them."""
    recipe = DataRecipe(batch_size=2, num_anchors=5, max_len=100, packed=True, min_samples=1)
    return next(ListIntake(make_samples(7), recipe, 0).microbatches(Place(), mine=lambda g: True))


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5-like target: four layers with recurrent state, one with attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    layer_types = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    torch.manual_seed(4)
    config = Qwen3_5TextConfig(**SIZES, **heads, layer_types=layer_types)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def features_alone(target: FrozenTarget, batch: MicroBatch) -> dict[tuple[int, int], torch.Tensor]:
    """By row and first place: what each document gives by itself."""
    return {
        (row, d.start): target.features(batch.ids_BL[row, None, d.start : d.start + d.length])[0]
        for row, placed in enumerate(batch.samples)
        for d in placed
    }


@pytest.mark.parametrize("keep_mb", [0, 1])
def test_each_sample_gets_the_features_of_its_own_ids(
    target: FrozenTarget, batch: MicroBatch, keep_mb: int
) -> None:
    features = Features(target, keep_mb).of(batch)

    assert features.shape == (4, batch.ids_BL.shape[1], 64)
    for (row, start), alone in features_alone(target, batch).items():
        made = features[row, start : start + len(alone)]
        assert torch.allclose(made, alone, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("keep_mb", [0, 1])
@pytest.mark.parametrize("kind", ["qwen_dir", "llama_dir", "hybrid_dir"])
def test_documents_that_share_a_row_have_the_features_that_they_have_alone(
    kind: str, keep_mb: int, packed_batch: MicroBatch, request: pytest.FixtureRequest
) -> None:
    target = open_target(request.getfixturevalue(kind))

    features = Features(target, keep_mb).of(packed_batch)

    assert max(len(row) for row in packed_batch.samples) > 2
    assert features.shape == (2, 100, 64)
    for (row, start), alone in features_alone(target, packed_batch).items():
        made = features[row, start : start + len(alone)]
        assert (made - alone).abs().max() < 2e-4 * alone.abs().max()


def test_a_recurrent_target_mixes_documents_unless_each_has_a_row_of_its_own(
    hybrid_dir: Path, packed_batch: MicroBatch
) -> None:
    target = open_target(hybrid_dir)

    mixed = target.features(packed_batch.ids_BL, packed_batch.positions_BL)
    made = Features(target, 0).of(packed_batch)

    second = packed_batch.samples[0][1]
    span = slice(second.start, second.start + second.length)
    assert not torch.allclose(mixed[0, span], made[0, span], atol=0.1)


@pytest.mark.parametrize("kind", ["qwen_dir", "llama_dir", "window_dir", "hybrid_dir"])
def test_targets_whose_layers_all_go_by_the_mask_may_share_rows(
    kind: str, request: pytest.FixtureRequest
) -> None:
    assert open_target(request.getfixturevalue(kind)).is_recurrent == (kind == "hybrid_dir")


def test_a_target_with_layers_of_an_unknown_kind_may_not(target: FrozenTarget) -> None:
    target.model.config.layer_types = ["full_attention", "short_convolution"]

    assert target.is_recurrent


@pytest.mark.parametrize("kind", ["qwen_dir", "hybrid_dir"])
def test_the_states_that_a_teacher_needs_are_each_documents_own(
    kind: str, packed_batch: MicroBatch, request: pytest.FixtureRequest
) -> None:
    target = open_target(request.getfixturevalue(kind))

    features, states = Features(target, 0).with_states(packed_batch)

    assert states.shape == (2, 100, 32)
    assert torch.equal(features, Features(target, 0).of(packed_batch))
    last = packed_batch.samples[1][-1]
    ids = packed_batch.ids_BL[1, None, last.start : last.start + last.length]
    alone = target.features_and_states(ids)[1][0]
    made = states[1, last.start : last.start + last.length]
    assert torch.allclose(made, alone, rtol=1e-3, atol=1e-3)


def test_kept_features_are_not_made_again_and_have_the_same_bits(
    target: FrozenTarget, batch: MicroBatch
) -> None:
    features = Features(target, 1)
    first = features.of(batch)

    torch.nn.init.zeros_(target.model.get_input_embeddings().weight)

    assert torch.equal(features.of(batch), first)
    assert not torch.equal(Features(target, 1).of(batch), first)
