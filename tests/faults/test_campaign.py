"""The campaign with one seed, short: what `python -m tests.faults.campaign` does for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import schedule
from tests.faults.campaign import Options, hold


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_drawn_faults_over_three_thousand_prompts_break_no_law(tmp_path: Path) -> None:
    report = hold(Options(seed=7, minutes=5, prompts=3000, faults=40), tmp_path)

    print(report.text())
    assert report.broken_laws == []
    assert report.num_prompts >= 3000
    assert report.num_completed == report.num_prompts
    assert report.twice.ratio <= 1.05
    assert set(report.faults) == {schedule.KILL, *schedule.OTHERS}
