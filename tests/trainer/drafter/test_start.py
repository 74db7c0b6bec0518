"""How a drafter begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.start import copy_target_layers, start_at_random
from trainer.online.target import load_target


def test_a_seed_decides_every_weight(small_config: DrafterConfig) -> None:
    drafters = [Drafter(small_config) for _ in range(3)]

    for drafter, seed in zip(drafters, (0, 0, 1), strict=True):
        start_at_random(drafter, seed)

    first, same, other = (torch.nn.utils.parameters_to_vector(d.parameters()) for d in drafters)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_copy_has_the_targets_last_layers_and_passes_the_last_feature(
    qwen_dir: Path, small_config: DrafterConfig
) -> None:
    cpu = torch.device("cpu")
    target = load_target(str(qwen_dir), [1, 3], dtype=torch.float32, device=cpu)
    torch.nn.init.constant_(target.layers[3].get_parameter("input_layernorm.weight"), 2.0)
    torch.nn.init.constant_(target.model.get_decoder().norm.weight, 3.0)
    drafter = Drafter(small_config)
    start_at_random(drafter, 0)

    copy_target_layers(drafter, target.layers, target.model.get_decoder().norm)

    ours, theirs = drafter.layers[1].state_dict(), target.layers[4].state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (drafter.hidden_norm.weight == 2.0).all()
    assert (drafter.norm.weight == 3.0).all()
    features = torch.randn(3, 64)
    assert torch.equal(drafter.fc(features), features[:, 32:])


def test_a_target_of_another_shape_is_refused(qwen_dir: Path, small_config: DrafterConfig) -> None:
    cpu = torch.device("cpu")
    target = load_target(str(qwen_dir), [1, 3], dtype=torch.float32, device=cpu)
    drafter = Drafter(dataclasses.replace(small_config, intermediate_size=48))

    with pytest.raises(BadInput, match="start at random"):
        copy_target_layers(drafter, target.layers, target.model.get_decoder().norm)
