"""Turns against transformers' own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.rotary import Rotary, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
POSITIONS = torch.tensor([[0, 1, 5, 499], [7, 8, 9, 100_000]])


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_a_head_is_turned_as_its_target_turns_it(
    small_config: DrafterConfig, scaling: dict[str, Any] | None
) -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 3, 4, 8)
    config = dataclasses.replace(small_config, rope_scaling=scaling)
    target = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})},
    )

    turned = rotate(heads, Rotary(config)(POSITIONS))

    cosines, sines = LlamaRotaryEmbedding(target)(heads, POSITIONS)
    wanted, _ = apply_rotary_pos_emb(heads, heads, cosines, sines)
    assert torch.allclose(turned, wanted, atol=1e-6)


def test_a_partial_rotation_turns_the_first_dimensions_and_leaves_the_rest(
    small_config: DrafterConfig,
) -> None:
    heads = torch.randn(2, 3, 4, 8)
    scaling = {"rope_type": "default", "partial_rotary_factor": 0.5}
    whole_of_four = dataclasses.replace(small_config, head_dim=4)

    turned = rotate(
        heads, Rotary(dataclasses.replace(small_config, rope_scaling=scaling))(POSITIONS)
    )

    assert torch.equal(turned[..., 4:], heads[..., 4:])
    assert torch.equal(turned[..., :4], rotate(heads[..., :4], Rotary(whole_of_four)(POSITIONS)))


def test_a_cast_of_the_drafter_does_not_move_far_positions(small_config: DrafterConfig) -> None:
    drafter = Drafter(small_config)

    cast = copy.deepcopy(drafter).to(torch.bfloat16)

    for got, wanted in zip(cast.rotary(POSITIONS), drafter.rotary(POSITIONS), strict=True):
        assert torch.equal(got, wanted)
