"""deploy/systemd: units that systemd itself finds nothing wrong with."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.commands import check_command
from tests.programs import program

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMMAND = re.compile(r"^ExecStart=(\S+/dflash-fleet) (.+)$", re.MULTILINE)


def text_of(unit: Path) -> str:
    return re.sub(r"\\\n\s*", "", unit.read_text())


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    there = tmp_path / unit.name
    there.write_text(COMMAND.sub("ExecStart=/bin/true", text_of(unit)))

    done = subprocess.run(
        [program("systemd-analyze", install="apt-get install systemd"), "verify", str(there)],
        capture_output=True,
        text=True,
    )

    assert [line for line in done.stderr.splitlines() if unit.name in line] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_command_is_one_that_there_is(unit: Path) -> None:
    text = text_of(unit)
    found = COMMAND.search(text)

    assert found
    check_command(shlex.split(found[2]))
    assert "EnvironmentFile=/etc/dflash-fleet.env" in text  # and no secret in the unit
    assert "User=fleet" in text


def test_cloud_init_writes_the_very_unit() -> None:
    config = yaml.safe_load((DEPLOY / "cloud-init.yaml").read_text())
    files = {file["path"]: file["content"] for file in config["write_files"]}

    unit = (DEPLOY / "systemd" / "dflash-node.service").read_text()
    assert files["/etc/systemd/system/dflash-node.service"] == unit
