"""How a worker starts beside an engine that is not well yet, and what it is called by itself."""

from __future__ import annotations

import socket
import threading

import pytest

from dflash_workers.contract.settings import Settings
from dflash_workers.opening import default_slot
from tests.batches import MakeWorker
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("engine_url", "slot"),
    [
        ("http://127.0.0.1:30000", f"{HOST}-30000"),
        ("http://localhost:30001/", f"{HOST}-30001"),
        ("http://gpu-1:30000", f"{HOST}-gpu-1-30000"),
        ("http://gpu-2:30000", f"{HOST}-gpu-2-30000"),
        ("https://[fd00::7]:30000", f"{HOST}-fd00--7-30000"),
        ("https://engine.example.com", f"{HOST}-engine.example.com-https"),
    ],
)
def test_two_workers_of_one_host_have_two_names_each_the_same_after_a_restart(
    engine_url: str, slot: str
) -> None:
    assert default_slot(engine_url) == slot
    assert Settings(slot=slot).slot == slot


def test_a_worker_starts_beside_an_engine_that_calls_itself_unhealthy(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    plan.add([prompt("say:a")])
    engine.is_healthy = False

    worker = make_worker()

    assert worker.site.gate.is_admitted(plan.spec.run)


def test_an_engine_that_refuses_while_it_loads_is_waited_for_as_one_that_is_not_there(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    plan.add([prompt("say:a")])
    engine.manner = "status=503 fail=1000"
    loading = threading.Timer(2.0, setattr, (engine, "manner", ""))
    loading.start()

    worker = make_worker()

    assert not loading.is_alive()
    assert worker.site.gate.is_admitted(plan.spec.run)
