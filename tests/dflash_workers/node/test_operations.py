"""docs/operations.md and deploy/: every command in there is one that the program takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml  # type: ignore[import-untyped]

from dflash_workers.cli_node import app
from dflash_workers.contract.settings import load_settings

ROOT = Path(__file__).parents[3]
CLOUD_INIT = ROOT / "deploy" / "cloud-init.yaml"
TEXTS = [ROOT / "docs" / "operations.md", ROOT / "deploy" / "slurm.sh", CLOUD_INIT]
VALUES = {"$port": "30001", "N": "1", "R": "run"}  # what people fill in


def commands_in(text: str) -> list[list[str]]:
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"dflash-fleet\"? node ([^`|#\n]+)", joined)
    return [[VALUES.get(word, word) for word in shlex.split(line)] for line in found]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_of_the_documents_can_be_called(path: Path) -> None:
    group: Any = typer.main.get_command(app)
    commands = commands_in(path.read_text())

    for words in commands:
        name, *flags = words if words[0] in group.commands else ["start", *words]
        command = group.commands[name]
        command.make_context(name, [flag for flag in flags if flag != "$@"])

    assert len(commands) >= 1


def test_cloud_init_is_yaml_whose_settings_there_are() -> None:
    config = yaml.safe_load(CLOUD_INIT.read_text())
    files = {file["path"]: file for file in config["write_files"]}
    lines = files["/etc/dflash-fleet.env"]["content"].replace("CHANGE", "changed").splitlines()

    settings = load_settings({}, dict(line.split("=", 1) for line in lines))

    assert settings.spot_provider == "aws"
    assert files["/etc/dflash-fleet.env"]["permissions"] == "0600"
    assert "KillMode=mixed" in files["/etc/systemd/system/dflash-node.service"]["content"]


@pytest.mark.parametrize("name", ["slurm.sh", "install-node.sh"])
def test_scripts_are_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "deploy" / name], check=True)
