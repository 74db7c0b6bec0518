"""The exporter, as a supervisor starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from dflash_workers.cli_exporter import app
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import free_ports
from tests.batches import until
from tests.dflash_workers.test_exporter import scrape
from tests.planned import Plan, prompt

ROOT = Path(__file__).parents[2]


def test_it_explains_itself_with_an_example() -> None:
    shown = CliRunner().invoke(app, ["--help"])

    assert shown.exit_code == 0
    assert "dflash-fleet exporter" in shown.output


@pytest.mark.slow
def test_the_exporter_answers_prometheus_and_keeps_progress_until_it_is_told_to_end(
    plan: Plan, settings: Settings, tmp_path: Path
) -> None:
    plan.add([prompt("say:a")])
    (port,) = free_ports(1)
    file = tmp_path / "progress.json"
    own = {k: v for k, v in settings.environment().items() if v}
    verb = [sys.executable, "-m", "fleet", "exporter", "--port", f"{port}"]
    flags = ["--every-s", "0.2", "--progress-file", str(file)]
    child = subprocess.Popen([*verb, *flags], cwd=ROOT, env=os.environ | own)
    try:
        until(file.exists)
        assert scrape(port)["dflash_fleet_planned_prompts"] == {(settings.run,): 1}
        assert orjson.loads(file.read_bytes())["total"] == 1
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
    finally:
        child.kill()
        child.wait()
