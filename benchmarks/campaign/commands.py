"""How long the product's own commands take over the whole run, once nothing else is at work.

Called by __main__.py and conclude.py after the last commit: a person's patience, the start of the
program included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import orjson

from benchmarks.campaign.fleet import Fleet
from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.terminal import ExitCode
from tests.faults.processes import ROOT

TIMEOUT_S = 600.0
COMMANDS = {"status": ["status", "--json"], "reconcile": ["reconcile", "--json"]}


def time_commands(fleet: Fleet) -> dict[str, float]:
    """Seconds, by the command's name. Raises NotEnough where one fails."""
    took_s = {}
    for name, words in COMMANDS.items():
        began_s = time.monotonic()
        with _started(fleet, words) as process:
            process.communicate(timeout=TIMEOUT_S)
        if process.returncode:
            raise NotEnough(f"`dflash-fleet {name}` left with {process.returncode}")
        took_s[name] = time.monotonic() - began_s
    return took_s


class AuditCommand:
    """`dflash-fleet audit`, beside what else there is to be looked at. Use in a `with`."""

    def __init__(self, fleet: Fleet) -> None:
        self._began_s = time.monotonic()
        self._process = _started(fleet, ["audit", "--json"])

    def __enter__(self) -> AuditCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> tuple[dict[str, Any], float]:
        """What it found, and the seconds that it took."""
        told, _ = self._process.communicate()
        if self._process.returncode not in (0, ExitCode.SOME_REFUSED):
            raise NotEnough(f"`dflash-fleet audit` left with {self._process.returncode}")
        return orjson.loads(told), time.monotonic() - self._began_s


def _started(fleet: Fleet, words: list[str]) -> subprocess.Popen[bytes]:
    settings = fleet.settings_direct().environment()
    environ = os.environ | {name: value for name, value in settings.items() if value}
    return subprocess.Popen(
        [sys.executable, "-m", "fleet", *words],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
