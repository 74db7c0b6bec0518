"""What a node leaves to be read in its folder."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from dflash_workers.cli_node import app
from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.node.folder import NodeFolder


def test_a_start_that_failed_says_why_to_whoever_asks_later(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    with pytest.raises(Missing), folder.held():
        raise Missing("no engine: make its venv")

    asked = CliRunner().invoke(app, ["status", "--json", f"--state={tmp_path}"])
    shown = CliRunner().invoke(app, ["status", f"--state={tmp_path}"])

    assert asked.exit_code == 3
    facts = orjson.loads(asked.stdout)
    assert (facts["state"], facts["why"]) == ("failed", "no engine: make its venv")
    assert "no engine: make its venv" in shown.stdout


def test_a_start_beside_a_node_that_runs_leaves_what_that_one_says(tmp_path: Path) -> None:
    with NodeFolder(tmp_path).held():
        before = NodeFolder(tmp_path).read()

        with pytest.raises(BadInput, match="runs here already"), NodeFolder(tmp_path).held():
            pass

        assert NodeFolder(tmp_path).read() == before
