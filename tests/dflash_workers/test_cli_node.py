"""The node's verbs where no node runs."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from dflash_workers.cli_node import app


def test_stopping_where_no_node_runs_says_so_and_is_no_failure(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stop", "--state", str(tmp_path)])

    assert result.exit_code == 0
    assert "no node runs here" in result.output
