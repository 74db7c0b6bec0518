"""What the node's tests share: a run of a tiny model, and `dflash-fleet node` as a process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from typer.testing import CliRunner, Result

from dflash_workers.cli_node import app
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import BatchMessage, RunSpec
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.embedded import S3Login, free_ports
from producer.fingerprint import RunOptions, make_spec
from tests.conftest import BUCKET
from tests.dflash_workers.node import engine_stand_in
from tests.planned import Plan, prompt
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]


def until(holds: Callable[[], object], timeout_s: float = 240.0) -> None:
    """Wait; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"did not come about within {timeout_s:g} s"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def target_spec(target_dir: Path) -> RunSpec:
    """A run of that target, under any name."""
    return make_spec("base", str(target_dir), RunOptions(max_new_tokens=16), None)


@pytest.fixture(scope="module")
def node_settings(
    redis_url: str, s3_login: S3Login, target_dir: Path, target_spec: RunSpec
) -> Settings:
    """Of a run of this file's alone, whose run.json is written."""
    name = uuid.uuid4().hex[:12]
    settings = s3_login.put_in(
        Settings(
            redis_url=redis_url,
            redis_prefix=f"test-{name}:",
            s3_bucket=BUCKET,
            s3_prefix=f"test-{name}",
            run=f"run-{name}",
            slot=f"node-{name}",
            model=str(target_dir),
            max_in_flight=4,
        )
    )
    store = open_store(settings)
    store.put_new(RunKeys(settings.run).spec, dump(run_of(settings, target_spec)))
    store.client.close()
    return settings


def run_of(settings: Settings, spec: RunSpec) -> RunSpec:
    """Its target is its own, and so is its queue."""
    target = dataclasses.replace(spec.target, weights_sha256=settings.run)
    return dataclasses.replace(spec, run=settings.run, target=target)


@dataclass
class NodeProcesses:
    """`dflash-fleet node` over one folder, and a mark in the environment of all it starts."""

    settings: Settings
    spec: RunSpec
    state: Path
    python: Path
    mark: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def flags(self, num_engines: int = 1) -> list[str]:
        (port,) = free_ports(1)
        flags = ["--cpu", "--engines", str(num_engines), "--base-port", str(port)]
        return [*flags, "--engine-python", str(self.python), "--state", str(self.state)]

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet", "node", *(flags or self.flags())],
            cwd=ROOT,
            env=self.environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """Whatever state it is in."""
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        for started in self.started:
            started.wait()
            if started.stderr:
                started.stderr.close()

    def call(self, *words: str) -> Result:
        """Another verb, to its end, in this process."""
        flags = [*words, "--state", str(self.state)]
        return CliRunner().invoke(app, flags, env=self.environ())

    def environ(self) -> dict[str, str]:
        own = {k: v for k, v in self.settings.environment().items() if v}
        return os.environ | own | {"NODE_TEST": self.mark, "OMP_NUM_THREADS": "1"}

    def facts(self) -> dict[str, Any]:
        path = self.state / "node.json"
        return dict(orjson.loads(path.read_bytes())) if path.exists() else {}

    def is_serving(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.said(process)
        facts = self.facts()
        return facts.get("pid") == process.pid and facts.get("state") == "serving"

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return process.communicate(timeout=300)[1].decode()

    def plan(self, *messages: str) -> list[BatchMessage]:
        """One batch more of the run, planned and hinted."""
        store, hints = open_store(self.settings), open_hints(self.settings)
        try:
            planned = Plan(store, hints, self.spec)
            while store.exists(RunKeys(self.spec.run).segment(planned.num_segments)):
                planned.num_segments += 1
            sent = planned.add([prompt(message) for message in messages])
            hints.offer(sent, planned.queue)
            return sent
        finally:
            store.client.close()
            hints.app.close()
            hints.redis.close()

    def is_committed(self, message: BatchMessage) -> bool:
        store = open_store(self.settings)
        try:
            return store.exists(RunKeys(message.run).commit(message.segment, message.batch))
        finally:
            store.client.close()

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_marked = process.environ().get("NODE_TEST") == self.mark
            return is_marked and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # gone, or the system's own
            return False


@pytest.fixture(scope="module")
def node_processes(
    node_settings: Settings, target_spec: RunSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcesses]:
    folder = tmp_path_factory.mktemp("node")
    python = engine_stand_in.make(folder / "engine", "answers")
    spec = run_of(node_settings, target_spec)
    node = NodeProcesses(node_settings, spec, folder / "state", python, uuid.uuid4().hex)
    yield node
    node.close()
