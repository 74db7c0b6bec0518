"""A whole campaign, as `python -m benchmarks.campaign benchmarks/campaigns/short.toml` holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.campaign import kinds
from benchmarks.campaign.__main__ import hold, summary
from benchmarks.campaign.configuration import read_configuration
from tests.faults.processes import ROOT

SHORT = ROOT / "benchmarks" / "campaigns" / "short.toml"


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_fault_over_one_run_breaks_no_law(tmp_path: Path) -> None:
    wanted = read_configuration(SHORT)

    result = hold(wanted, tmp_path)
    print(summary(result))

    assert result.broken_laws == []
    assert {fault.kind for fault in result.faults} == set(kinds.ALL)
    assert result.oracle.num_completed == result.oracle.num_planned >= wanted.prompts.count
    assert result.oracle.num_token_rows
    assert result.oracle.num_token_rows >= result.oracle.num_completed
