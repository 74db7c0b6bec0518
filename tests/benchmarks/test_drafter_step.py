"""The benchmark of the drafter's step, where there is no GPU to measure."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.drafter_step import QWEN3_8B, Case, Measured, Peer, figures_of, main
from trainer.drafter.config import FULL
from trainer.drafter.fitting import spread_layer_ids
from trainer.drafter.flops import StepSize, step_flops
from trainer.drafter.model import Drafter


def test_a_quick_run_ends_in_one_figure(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--quick"])

    (line,) = capsys.readouterr().out.splitlines()
    assert code == 0
    assert json.loads(line)["figure"] == "drafter.quick_step_ms"
    assert json.loads(line)["value"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_full_run_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "CUDA" in capsys.readouterr().err


def test_the_shapes_are_qwen3_8bs() -> None:
    with torch.device("meta"):
        drafter = Drafter(QWEN3_8B)

    # 5 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 2 * 4096 + 2 * 128) + 5 * 4096^2 + 2 * 4096
    assert sum(p.numel() for p in drafter.parameters()) == 1_048_626_432
    assert QWEN3_8B.target_layer_ids == spread_layer_ids(36, 5)


def test_the_figures_are_ratios_of_what_was_measured() -> None:
    pairs = {FULL: 8192 * 1000}
    flops = step_flops(QWEN3_8B, StepSize(3072, 8192, 7680, pairs))
    measured = Measured(30.0, [90.0, 100.0, 140.0], 1.0, 12.0, flops, {})
    case = Case(QWEN3_8B, 3072, 512, torch.device("cpu"), torch.bfloat16)

    figures = {f.figure: f.value for f in figures_of(case, measured, Peer(150.0, 16.0))}

    assert figures["drafter.step_ms"] == 100.0
    assert figures["drafter.mfu"] == pytest.approx(flops.total / 0.1 / 989e12)
    assert figures["drafter.context_rate"] == pytest.approx(30_720)
    assert figures["drafter.mask_share"] == pytest.approx(0.01)
    assert figures["drafter.step_vs_peers"] == pytest.approx(1.5)
    assert figures["drafter.memory_vs_peers"] == pytest.approx(0.75)
    alone = figures_of(case, measured, None)
    assert not [f for f in alone if "peers" in f.figure]  # absent, not filled from elsewhere
