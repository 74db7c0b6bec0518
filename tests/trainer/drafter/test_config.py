"""What follows from a target and a shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, Qwen3Config

from dflash_workers.contract.errors import BadInput, Corrupt
from dflash_workers.contract.records import decode, encode
from trainer.drafter.config import (
    FULL,
    SLIDING,
    DrafterConfig,
    DrafterShape,
    drafter_config,
    spread_layer_ids,
)
from trainer.online.target import target_config


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
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    target = Qwen3Config(num_hidden_layers=8, rope_parameters=rope)

    config = drafter_config(target, DrafterShape(1, 4, mask_token_id=5), "")

    assert (config.rope_theta, config.rope_scaling) == (1e7, None)


def test_a_window_goes_to_all_layers_but_the_last() -> None:
    shape = DrafterShape(3, 4, mask_token_id=5, sliding_window=64)

    config = drafter_config(LlamaConfig(num_hidden_layers=12), shape, "")

    assert config.layer_types == [SLIDING, SLIDING, FULL]
    assert config.sliding_window == 64


def test_the_mask_is_the_first_row_beyond_the_tokenizer(qwen_dir: Path) -> None:
    config = drafter_config(target_config(str(qwen_dir)), DrafterShape(1, 4), str(qwen_dir))

    assert config.mask_token_id == len(AutoTokenizer.from_pretrained(qwen_dir))


def test_a_stored_configuration_comes_back_the_same(small_config: DrafterConfig) -> None:
    assert decode(DrafterConfig, encode(small_config)) == small_config
    with pytest.raises(Corrupt):
        decode(DrafterConfig, {**encode(small_config), "blocksize": 4})


@pytest.mark.parametrize(
    "change",
    [
        {"target_layer_ids": [3, 1]},
        {"target_layer_ids": [1, 1]},
        {"target_layer_ids": []},
        {"target_layer_ids": [4]},  # the last layer of five: nobody can serve it
        {"mask_token_id": 512},
        {"layer_types": [FULL]},
        {"layer_types": [SLIDING, FULL], "sliding_window": 3},
        {"num_kv_heads": 3},
        {"rope_scaling": {"rope_type": "dynamic"}},
    ],
)
def test_an_inconsistent_configuration_cannot_exist(
    small_config: DrafterConfig, change: dict[str, Any]
) -> None:
    with pytest.raises(BadInput):
        dataclasses.replace(small_config, **change)
