"""What a recipe needs is counted from shapes alone."""

from __future__ import annotations

import pytest

from benchmarks.h200.headline.planning import needs_of
from tests.tiny_model import HIDDEN_SIZE, VOCAB_SIZE, make_tiny_model
from trainer.recipes import named_recipe

TINY = [
    "drafter.target_layer_ids=[0]",
    "drafter.mask_token_id=500",
    "data.max_len=1024",
    "data.num_anchors=4",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # a config is enough
    return str(folder)


def test_one_gpu_holds_target_features_drafter_and_a_chunk_of_logits(model_dir: str) -> None:
    (need,) = needs_of(named_recipe("qwen3_8b_h200", TINY), model_dir)

    rows = 4 * 15  # anchors, and the drafts of a block of 16
    assert need.parts["features of a microbatch"] == 1024 * HIDDEN_SIZE * 2
    assert need.parts["logits of a chunk"] == rows * VOCAB_SIZE * 10
    assert need.total == sum(need.parts.values())


def test_gpus_that_train_hold_no_more_of_the_target_than_its_ends(model_dir: str) -> None:
    changes = [*TINY, "drafter.sliding_window=64"]

    target, drafter = needs_of(named_recipe("qwen36_27b_2x2", changes), model_dir)

    assert (target.role, target.num_gpus, drafter.role) == ("target", 2, "drafter")
    assert drafter.parts["head and embedding"] in (
        VOCAB_SIZE * HIDDEN_SIZE * 2,
        VOCAB_SIZE * HIDDEN_SIZE * 4,
    )
    assert "drafter, gradients, optimizer" not in target.parts
