"""Parity holds for a drafter that is right, and each way of being wrong shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_workers.contract.errors import NotEnough
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.export import export_drafter
from trainer.drafter.model import Drafter, InjectedAttention
from trainer.drafter.speculate import Limits
from trainer.drafter.start import start_at_random
from trainer.online.target import FrozenTarget, load_target
from trainer.parity import Parity, Replay, check_parity

LIMITS = Limits(max_new_tokens=8, stop_ids=frozenset())
REPLAYS = [
    Replay([11, 12, 13, 14, 15, 200, 7, 31, 90, 91, 300], prompt_len=4),
    Replay([42, 43, 44, 45, 46, 17, 18, 19, 20, 21, 22, 23, 24], prompt_len=6),
]


@pytest.fixture(scope="module")
def target(qwen_dir: Path) -> FrozenTarget:
    return load_target(str(qwen_dir), [1, 3], dtype=torch.float32, device=torch.device("cpu"))


def export_of(config: DrafterConfig, folder: Path) -> Path:
    drafter = Drafter(config)
    start_at_random(drafter, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # far from linear, so that differences show
    return export_drafter(drafter, folder, dtype="float32", provenance={})


@pytest.fixture
def export(small_config: DrafterConfig, tmp_path: Path) -> Path:
    return export_of(small_config, tmp_path / "export")


def parity_of(export: Path, target: FrozenTarget) -> Parity:
    return check_parity(export, target, REPLAYS, LIMITS)


@pytest.mark.parametrize("change", [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 5}])
def test_every_way_agrees_and_z_labs_class_with_it(
    change: dict[str, object], small_config: DrafterConfig, target: FrozenTarget, tmp_path: Path
) -> None:
    config = dataclasses.replace(small_config, **change)  # type: ignore[arg-type]

    parity = parity_of(export_of(config, tmp_path / "export"), target)

    assert parity.faults == []
    assert parity.num_blocks == 7 + 7
    assert max(parity.features, parity.states) < 1e-5
    if os.environ.get("CI") or importlib.util.find_spec("dflash"):
        assert parity.reference is not None
        assert parity.reference < 1e-5


def test_a_dspark_drafter_has_no_reference_and_agrees_with_itself(
    small_config: DrafterConfig, target: FrozenTarget, tmp_path: Path
) -> None:
    config = dataclasses.replace(small_config, markov_rank=4)

    parity = parity_of(export_of(config, tmp_path / "export"), target)

    assert parity.faults == []
    assert parity.reference is None


def test_features_of_the_layer_before_are_a_fault(
    export: Path, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FrozenTarget.features

    def off_by_one(self: FrozenTarget, ids_BL: Tensor) -> Tensor:
        output = self.model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
        whole(self, ids_BL)
        return torch.cat([output.hidden_states[i] for i in self.layer_ids], dim=-1)

    monkeypatch.setattr(FrozenTarget, "features", off_by_one)

    assert "layers' outputs" in parity_of(export, target).faults[0]


def test_training_that_sees_the_anchors_own_feature_is_a_fault(
    export: Path, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = InjectedAttention.forward

    def leaky(self: InjectedAttention, block: Tensor, context: object, *rest: Tensor) -> Tensor:
        rotation, mask = rest
        is_training = mask.shape[-2] > 4  # decoding has one block
        opened = mask.logical_or(mask.roll(1, dims=-1)) if is_training else mask
        return attend(self, block, context, rotation, opened)  # type: ignore[arg-type]

    monkeypatch.setattr(InjectedAttention, "forward", leaky)

    assert "training and decoding" in parity_of(export, target).faults[0]


def test_a_prediction_that_decoding_does_not_keep_is_a_fault() -> None:
    kept = Parity(0.0, 0.0, None, 2.0, 1.95, 1, 1)

    assert kept.faults == []
    assert "accept length 1.500" in dataclasses.replace(kept, measured_accept_length=1.5).faults[0]


def test_not_a_number_is_a_fault() -> None:
    assert Parity(0.0, float("nan"), None, 1.0, 1.0, 1, 1).faults


def test_nothing_to_replay_is_said(export: Path, target: FrozenTarget) -> None:
    with pytest.raises(NotEnough, match="held-out"):
        check_parity(export, target, [Replay([5, 6, 7], prompt_len=3)], LIMITS)
