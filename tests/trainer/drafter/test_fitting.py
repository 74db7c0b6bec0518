"""What follows from a target and a shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, Qwen3Config

from trainer.drafter.config import FULL, SLIDING, DrafterShape
from trainer.drafter.fitting import drafter_config, spread_layer_ids
from trainer.online.target import target_config

PARTIAL = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "layer_ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # as published for Qwen3-8B
        (64, 5, [1, 16, 31, 46, 61]),  # as published for Qwen3.6-27B
        (30, 1, [15]),
        (2, 1, [0]),
    ],
)
def test_the_default_layers_are_those_of_the_published_drafters(
    num_target_layers: int, num_draft_layers: int, layer_ids: list[int]
) -> None:
    assert spread_layer_ids(num_target_layers, num_draft_layers) == layer_ids


def test_sizes_and_rotary_scaling_come_from_the_target(llama_dir: Path) -> None:
    target = target_config(str(llama_dir))

    config = drafter_config(target, DrafterShape(num_layers=2, block_size=4), str(llama_dir))

    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (32, 4, 2)
    assert config.target_layer_ids == [1, 2]
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "llama3"


def test_a_partial_rotation_of_the_target_is_not_inherited() -> None:
    target = Qwen3Config(num_hidden_layers=8, rope_parameters=PARTIAL)

    config = drafter_config(target, DrafterShape(1, 4, mask_token_id=5), "")

    assert (config.rope_theta, config.rope_scaling) == (1e7, None)
    assert config.rotary_dim == config.head_dim


def test_a_partial_rotation_is_taken_over_where_the_shape_asks_for_it() -> None:
    target = Qwen3Config(num_hidden_layers=8, head_dim=128, rope_parameters=PARTIAL)

    config = drafter_config(target, DrafterShape(1, 4, mask_token_id=5, partial_rotary=True), "")

    assert config.rotary_dim == 32
    assert config.rope_theta == 1e7


def test_biases_and_epsilon_are_the_targets() -> None:
    target = LlamaConfig(num_hidden_layers=8, attention_bias=True, rms_norm_eps=1e-4)

    config = drafter_config(target, DrafterShape(1, 4, mask_token_id=5), "")

    assert config.attention_bias
    assert config.rms_norm_eps == 1e-4
    assert config.layer_types == [FULL]


def test_a_window_goes_to_all_layers_but_the_last() -> None:
    shape = DrafterShape(3, 4, mask_token_id=5, sliding_window=64)

    config = drafter_config(LlamaConfig(num_hidden_layers=12), shape, "")

    assert config.layer_types == [SLIDING, SLIDING, FULL]
    assert config.sliding_window == 64


def test_the_mask_is_the_first_row_beyond_the_tokenizer(qwen_dir: Path) -> None:
    config = drafter_config(target_config(str(qwen_dir)), DrafterShape(1, 4), str(qwen_dir))

    assert config.mask_token_id == len(AutoTokenizer.from_pretrained(qwen_dir))
