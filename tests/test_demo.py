"""The demo, shortened by its own options: interrupted, killed, finished, and run once more.

The claims of this file are about whole processes, so they share one state folder and stand in the
order in which a person would meet them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent
SHORT = ["--rows", "64", "--max-tokens", "24", "--steps", "150", "--heldout", "6", "--json"]


@dataclass(frozen=True)
class Place:
    """A state folder, and a mark in the environment of everything that is started for it."""

    state: Path
    engine_python: Path
    mark: str

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "fleet", "demo", *self._flags(), *SHORT],
            cwd=ROOT,
            env=os.environ | {"DEMO_TEST": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _flags(self) -> list[str]:
        return ["--state", str(self.state), "--engine-python", str(self.engine_python)]

    def run(self) -> dict[str, Any]:
        with self.start() as process:
            stdout, stderr = process.communicate(timeout=800)
        assert process.returncode == 0, stderr.decode()
        facts: dict[str, Any] = orjson.loads(stdout)
        return facts

    def log(self, name: str) -> str:
        path = self.state / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            in_environ = process.environ().get("DEMO_TEST") == self.mark
            return in_environ or any(str(self.state) in word for word in process.cmdline())
        except psutil.Error:  # gone, or the system's own
            return False


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, engine_python: Path) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("demo"), engine_python, uuid.uuid4().hex)
    yield place
    for process in place.processes():
        process.kill()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.2)
    return holds()


def test_ctrl_c_while_the_engine_starts_leaves_no_process(place: Place) -> None:
    with place.start() as demo:
        assert wait_until(lambda: "server_args" in place.log("engine"), 240), place.log("engine")

        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)

    assert demo.returncode == 130
    assert wait_until(lambda: not place.processes(), 15), place.processes()


def test_kill_9_in_the_middle_of_generating_leaves_no_process(place: Place) -> None:
    with place.start() as demo:
        assert wait_until(lambda: "committed" in place.log("worker"), 300), place.log("worker")

        demo.kill()
        demo.communicate()

    assert wait_until(lambda: not place.processes(), 15), place.processes()


def test_the_next_run_goes_on_and_a_trained_drafter_beats_an_untrained_one(place: Place) -> None:
    facts = place.run()

    assert facts["planned"] == facts["completed"] + sum(facts["rejected"].values())
    assert sum(facts["refused"].values()) >= 3
    assert facts["last_loss"] < facts["first_loss"]
    assert facts["accept_length"] > facts["accept_length_untrained"]
    assert facts["gain_low"] > 0
    assert facts["replies_changed"] == 0
    assert place.processes() == []


def test_a_finished_demo_generates_and_trains_nothing(place: Place) -> None:
    engine_log, worker_log = place.log("engine"), place.log("worker")
    checkpoints = sorted((place.state / "drafter").rglob("*.safetensors"))
    written = [path.stat().st_mtime_ns for path in checkpoints]

    facts = place.run()

    assert facts["completed"] > 0
    assert (place.log("engine"), place.log("worker")) == (engine_log, worker_log)
    assert [path.stat().st_mtime_ns for path in checkpoints] == written
