"""The benchmark of how full the engine is kept: what is made of what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fill
from benchmarks.fill import Fill, Load
from benchmarks.fill_live import Seen, figures_of
from benchmarks.fleet_run import Prompts, write_prompts


def test_the_prompts_are_distinct_and_the_same_at_every_call(tmp_path: Path) -> None:
    lines = write_prompts(tmp_path / "a", Prompts(300, words=12)).read_bytes().splitlines()

    assert lines == write_prompts(tmp_path / "b", Prompts(300, words=12)).read_bytes().splitlines()
    assert len(set(lines)) == 300


def test_live_figures_are_ratios_of_means_at_each_limit() -> None:
    seen = [
        Seen("fleet", 98.0, 10.0, 1.0),
        Seen("client", 100.0, 10.0, 0.0),
        Seen("fleet", 96.0, 10.0, 1.4),
        Seen("client", 100.0, 10.0, 0.0),
    ]

    figures = {f.figure: f for f in figures_of(seen, 256, "h200")}

    assert figures["fill.h200_256"].value == pytest.approx(0.97)
    assert figures["fill.h200_256"].is_met is True
    assert figures["worker.cpu_ms"].value == pytest.approx(1.2)
    assert "worker.cpu_ms" not in {f.figure for f in figures_of(seen, 48, "h200")}


def test_the_gate_is_the_lower_of_the_workers_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {256: 0.99, 64: 0.98}
    monkeypatch.setattr(
        fill,
        "measure",
        lambda load: Fill(0.5 if load.num_batches else shares[load.batch_size], 1.0, 1, 1.0),
    )

    figures, prose = fill.measure_simulated(fill.full_loads())

    assert (figures[0].figure, figures[0].value, figures[0].is_met) == (
        "fill.simulated",
        0.98,
        True,
    )
    assert [figure.value for figure in figures[1:]] == [0.99, 0.5, 0.5, 0.98, 0.5, 0.5]
    assert "in 1 or 2 ms" in prose


@pytest.mark.slow
def test_a_real_worker_keeps_a_simulated_engine_busy_until_the_queue_is_empty() -> None:
    load = Load("test", 8, 8 * 12, step_ms=4.0, limit=8, mean_tokens=200, max_tokens=2000)

    found = fill.measure(load)

    assert 0.5 < found.share <= 1.0
    assert found.num_finished > 8
    assert found.cpu_ms > 0
