"""Which states the drafter reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_workers.contract.errors import BadInput, Missing
from trainer.online.target import FrozenTarget, load_target

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 0, 0, 0]])  # the second one is padded


def open_target(folder: Path) -> FrozenTarget:
    return load_target(str(folder), [0, 2, 3], dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", ["qwen_dir", "llama_dir"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_feature_is_the_state_after_its_layer(
    kind: str, is_cut: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states = model(IDS[1:, :3], output_hidden_states=True).hidden_states
    target = open_target(folder)
    if is_cut:
        target.cut()

    features = target.features(IDS)

    assert features.shape == (2, 6, 96)
    wanted = torch.cat([states[i + 1] for i in (0, 2, 3)], dim=-1)
    assert torch.allclose(features[1, :3], wanted[0], rtol=1e-4, atol=1e-3)


def test_a_cut_target_has_no_layer_behind_the_last_one_needed(qwen_dir: Path) -> None:
    target = open_target(qwen_dir)

    target.cut()

    assert len(target.layers) == 4


def test_nothing_of_the_target_can_be_trained(qwen_dir: Path) -> None:
    target = open_target(qwen_dir)

    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.features(IDS).requires_grad


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="pass --model"):
        open_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(BadInput, match="can't be loaded"):
        open_target(tmp_path)
