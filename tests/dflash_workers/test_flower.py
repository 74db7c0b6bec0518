"""Flower as a person sees it in a real browser: workers by slot, batches by name, with a login."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest
from flower.events import EventsState

from celeryconfig import GENERATE_TASK
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import free_ports
from dflash_workers.flower_command import MAX_TASKS, flower_command
from tests.batches import is_committed, until
from tests.browser import render
from tests.dflash_workers.test_exporter import scrape
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

ROOT = Path(__file__).parents[2]
LOGIN = "ada:s3cr3t-and-long"


def test_its_memory_is_bounded_its_state_is_kept_and_no_secret_is_an_argument(
    redis_settings: Settings, tmp_path: Path
) -> None:
    settings = replace(redis_settings, flower_login=LOGIN, redis_url="redis://:hidden@localhost/0")

    command, secrets = flower_command(settings, 5555, tmp_path / "state")

    assert f"--max-tasks={MAX_TASKS}" in command
    assert "--address=127.0.0.1" in command
    assert "--persistent=True" in command
    assert not [word for word in command if "s3cr3t" in word or "hidden" in word]
    assert secrets == {
        "BROKER_URL": "redis://:hidden@localhost/0",
        "FLOWER_BASIC_AUTH": LOGIN,
    }
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_said(redis_settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = replace(redis_settings, flower_login=LOGIN)

    with pytest.raises(BadInput, match=r"--state .*file"):
        flower_command(settings, 5555, tmp_path / "file" / "state")


def test_what_it_keeps_of_two_thousand_batches_is_bounded_by_its_limit() -> None:
    state = EventsState(max_tasks_in_memory=100)

    for number in range(2000):
        state.event(
            {
                "type": "task-received",
                "uuid": f"run/0/{number}",
                "name": GENERATE_TASK,
                "hostname": "gpu-7@fleet",
                "timestamp": float(number),
                "local_received": float(number),
                "clock": number,
            }
        )

    assert len(state.tasks) == 100
    assert "run/0/1999" in state.tasks


@dataclass
class Processes:
    """The command's verbs as processes, ended by the fixture."""

    settings: Settings
    log: Path
    children: list[subprocess.Popen[bytes]]

    def start(self, *verb: str, **environ: str) -> subprocess.Popen[bytes]:
        own = {k: v for k, v in self.settings.environment().items() if v}
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "fleet", *verb],
                cwd=ROOT,
                env=os.environ | own | environ,
                stdout=log,
                stderr=log,
            )
        self.children.append(child)
        return child


@pytest.fixture
def processes(worker_settings: Settings, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(worker_settings, tmp_path / "log", [])
    yield processes
    for child in processes.children:
        child.kill()
        child.wait()


def ask(url: str, login: str = LOGIN) -> bytes:
    header = "Basic " + base64.b64encode(login.encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": header} if login else {})
    with urllib.request.urlopen(request, timeout=10) as reply:
        body: bytes = reply.read()
        return body


def answers(url: str, login: str = LOGIN) -> bool:
    try:
        return bool(ask(url, login))
    except OSError:
        return False


def status_without_login(url: str) -> int:
    try:
        ask(url, login="")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


@pytest.mark.slow
def test_a_browser_shows_workers_by_slot_and_batches_by_name_to_who_has_the_login(
    processes: Processes,
    plan: Plan,
    store: Store,
    hints: Hints,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    good, rejected = plan.add([prompt("say:a"), prompt("say:b")], [prompt("refuse")])
    port, metrics_port = free_ports(2)
    where, state = f"127.0.0.1:{port}", str(tmp_path / "state")
    command = ("flower", "--port", f"{port}", "--state", state)
    flower = processes.start(*command, DFLASH_FLOWER_LOGIN=LOGIN)
    until(lambda: answers(f"http://{where}/api/workers"))
    processes.start("worker", "--slot", "gpu-7", "--metrics-port", f"{metrics_port}")
    until(lambda: answers(f"http://127.0.0.1:{metrics_port}/metrics"))
    until(lambda: b"gpu-7@fleet" in ask(f"http://{where}/api/workers?refresh=0") or seen(where))
    hints.offer([good, rejected], plan.queue)
    until(lambda: is_committed(store, good) and is_committed(store, rejected))
    until(lambda: len(succeeded(where)) == 2)

    shown = [
        render(
            f"http://{LOGIN}@{where}/{page}",
            tmp_path / f"{page}.png",
            ready=f"document.body.innerText.includes({word!r})",
            questions={"text": "document.body.innerText"},
        )
        for page, word in (("workers", "gpu-7"), ("tasks", good.batch))
    ]

    workers, tasks = (page.answers["text"] for page in shown)
    assert "gpu-7@fleet" in workers
    assert "Online" in workers
    for message in (good, rejected):
        assert f"{message.run}/{message.segment}/{message.batch}" in tasks
    assert tasks.count("SUCCESS") >= 2
    assert "committed: 2 rows, 0 rejected" in tasks
    assert "committed: 0 rows, 1 rejected (engine_refused)" in tasks
    for page in ("", "workers", "tasks", "api/workers", "api/tasks"):
        assert status_without_login(f"http://{where}/{page}") == 401
    assert status_without_login(f"http://{where}/metrics") == 200  # as SECURITY.md says
    assert scrape(metrics_port)["dflash_worker_messages_total"][("gpu-7", "received")] == 2

    flower.send_signal(signal.SIGTERM)
    flower.wait(timeout=30)
    processes.start(*command, DFLASH_FLOWER_LOGIN=LOGIN)
    until(lambda: answers(f"http://{where}/api/tasks"))
    assert len(succeeded(where)) == 2  # it remembers


def seen(where: str) -> bool:
    """Whether Flower has heard a worker's heartbeat."""
    return b"gpu-7" in ask(f"http://{where}/workers?json=1")


def succeeded(where: str) -> list[str]:
    found = orjson.loads(ask(f"http://{where}/api/tasks"))
    return [name for name, task in found.items() if task["state"] == "SUCCESS"]
