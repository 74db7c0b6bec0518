"""The benchmark of targets and drafters on GPUs of their own, where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paired.__main__ import main
from benchmarks.paired.divisions import ALONE, Division, divisions
from benchmarks.paired.results import best_step_s, figures_of
from trainer.online.topology import Topology

PHASES = {"data": 0.0, "target": 0.4, "transfer": 0.0, "drafter": 0.5, "optimizer": 0.1}


def part(division: Division, step_s: float, losses: list[float], **phases: float) -> dict[str, Any]:
    """What a part of three steps leaves."""
    ranks = [
        {
            "rank": rank,
            "has_drafter": rank >= division.num_targets,
            "peak_gib": 10.0 + rank,
            "message_bytes": 2_000_000_000,
            "link_s": 0.02 if rank == division.num_targets else 0.0,
            "phases": [PHASES | phases] * 3,
            "steps_s": [step_s] * 3,
            "losses": losses,
            "num_tokens": [3000] * 3,
        }
        for rank in range(division.num_ranks)
    ]
    sizes = {"num_targets": division.num_targets, "num_drafters": division.num_drafters}
    return {**sizes, "num_microbatches": 12, "ranks": ranks}


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_every_division_of_the_gpus_is_measured_once_and_none_leaves_a_gpu_out(
    num_gpus: int,
) -> None:
    found = divisions(num_gpus)

    assert found[0] == ALONE
    assert len(set(found)) == len(found)
    paired = [division for division in found if division.num_targets]
    assert {d.num_ranks for d in paired} == {num_gpus}
    assert len(paired) == num_gpus - 1
    for division in found:
        Topology(division.num_ranks, division.recipe).check_step(12)


def test_the_best_step_is_what_the_slower_side_needs_by_itself() -> None:
    assert best_step_s(Division(1, 1), [PHASES]) == pytest.approx(0.6)
    assert best_step_s(Division(1, 3), [PHASES]) == pytest.approx(0.4)
    assert best_step_s(Division(2, 2), [PHASES]) == pytest.approx(0.35)


def test_the_figures_are_made_of_what_the_parts_left_and_of_nothing_else() -> None:
    pair = Division(1, 1)
    found = {
        ALONE.name: part(ALONE, 1.0, [9.0, 8.0, 7.0]),
        pair.name: part(pair, 0.64, [9.0, 8.01, 7.0, 6.0], transfer=0.016),
    }

    figures = {figure.figure: figure for figure in figures_of(found, is_gpu=True)}

    assert figures["online.colocated_1_tokens_rate"].value == pytest.approx(3000)
    assert figures["online.paired_1_1_speedup"].value == pytest.approx(1 / 0.64)
    assert figures["online.paired_1_1_of_best"].value == pytest.approx(0.6 / 0.64)
    assert figures["online.paired_1_1_of_best"].is_met
    assert figures["online.wait_share"].value == pytest.approx(0.025)
    assert figures["online.paired_1_1_link_rate"].value == pytest.approx(100)
    assert figures["online.paired_1_1_feature_rate"].value == pytest.approx(12 * 2 / 0.64)
    assert figures["online.paired_1_1_loss_gap"].value == pytest.approx(0.01)
    assert figures["online.paired_1_1_drafter_memory"].value == 11.0
    assert not [name for name in figures if "death" in name or "real" in name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_full_run_without_gpus_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "4"]) == 1
    assert "4 CUDA GPUs" in capsys.readouterr().err


def test_what_parts_have_found_is_not_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    for division in (ALONE, Division(1, 1), Division(2, 2)):
        kept = tmp_path / "parts" / f"{division.name}.json"
        kept.write_text(json.dumps(part(division, 1.0, [9.0])))

    assert main(["--quick", "--out", str(tmp_path)]) == 0

    names = {json.loads(line)["figure"] for line in capsys.readouterr().out.splitlines()}
    assert {"online.paired_1_1_tokens_rate", "online.paired_2_2_loss_gap"} <= names


@pytest.mark.slow
def test_a_quick_run_trains_alone_and_in_pairs_to_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--out", str(tmp_path), "--budget-s", "300"]) == 0

    figures = {f["figure"]: f for f in map(json.loads, capsys.readouterr().out.splitlines())}
    losses = json.loads((tmp_path / "parts/paired_2_2.json").read_bytes())["ranks"][2]["losses"]
    assert len(set(losses)) == len(losses) >= 5
    for name in ("online.paired_1_1", "online.paired_2_2"):
        assert figures[f"{name}_loss_gap"]["value"] < 1e-5
        assert 0 <= figures[f"{name}_wait_share"]["value"] < 1
        assert figures[f"{name}_link_rate"]["value"] > 0
