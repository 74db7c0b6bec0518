"""The benchmark of several engines on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fill_many import Crew, Made, figures_of


def test_several_engines_are_held_against_as_many_times_one() -> None:
    crew = Crew(["a", "b"], Path(), 128, 40.0, 10.0, 6000)

    found = figures_of(crew, Made(1000.0, 4.0, 0.99), Made(1960.0, 7.9, 0.98), "h200")

    figures = {figure.figure: figure for figure in found}
    assert figures["fill.h200_128_2_engines_to_one"].value == pytest.approx(0.98)
    assert figures["fill.h200_128_2_engines_to_one"].is_met
    assert figures["fill.h200_128_2_fill"].value == 0.98
    assert figures["fill.h200_128_2_engines"].value == 1960.0
