"""When a worker takes no work, why, and how it comes back by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_workers import gate as gate_module
from dflash_workers.breaker import Breaker, Limits
from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    EngineUnavailable,
    FleetError,
    Missing,
    StoreUnavailable,
)
from dflash_workers.engine import Engine
from dflash_workers.gate import Checks, Gate
from tests.batches import until
from tests.dflash_workers.conftest import IMPATIENT
from tests.fake_engine import FakeEngine

QUICK = Limits(min_attempts=4, pause_s=0.0)


class Bench:
    """A gate before a fake engine, with a loop of its own, and troubles that a test may cause."""

    def __init__(self, url: str) -> None:
        self.troubles: dict[str, FleetError] = {}
        self.looked_at: list[str] = []  # runs, each time the engine was checked for one
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.engine = self.do(self._make_engine(url))
        checks = Checks(
            run="home",
            away_s=0.5,
            engine=self._check_engine,
            store=lambda: self._check("store"),
            redis=lambda: self._check("redis"),
            folder=Path("/"),
        )
        self.gate = Gate(self.engine, self.loop, checks, Breaker(QUICK))

    def do(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.do(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def fail(self, kind: str, error: FleetError) -> None:
        """As often as opens the breaker."""
        self.troubles[kind] = error
        for _ in range(QUICK.min_attempts):
            with pytest.raises(type(error)), self.gate.recording(kind):  # type: ignore[arg-type]
                raise error

    async def _make_engine(self, url: str) -> Engine:
        return Engine(url, 4, IMPATIENT)

    async def _check_engine(self, run: str) -> None:
        self.looked_at.append(run)
        self._check("engine")

    def _check(self, kind: str) -> None:
        if kind in self.troubles:
            raise self.troubles[kind]


@pytest.fixture
def bench(engine: FakeEngine) -> Iterator[Bench]:
    bench = Bench(engine.url)
    yield bench
    bench.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("store", StoreUnavailable("S3 is away")),
        ("store", AccessDenied("expired")),
        ("engine", EngineUnavailable("500")),
    ],
)
def test_what_fails_again_and_again_closes_the_gate_until_it_works(
    bench: Bench, kind: str, error: FleetError
) -> None:
    bench.fail(kind, error)

    why = bench.gate.why_closed()
    bench.gate.mend()
    while_it_fails = bench.gate.why_closed()
    bench.troubles.clear()
    until(lambda: bool(bench.gate.mend() or not bench.gate.why_closed()), 10)

    assert why is not None
    assert why.startswith(f"{kind}: 4 of 4 failed")
    assert while_it_fails == why


def test_an_answer_that_something_is_not_there_is_an_answer(bench: Bench) -> None:
    for _ in range(QUICK.min_attempts):
        with pytest.raises(Missing), bench.gate.recording("store"):
            raise Missing("no such key")

    assert bench.gate.why_closed() is None


def test_why_it_is_closed_is_said_once_and_that_it_opened_too(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dflash_workers.gate")
    bench.fail("store", StoreUnavailable("S3 is away"))

    for _ in range(3):
        bench.gate.mend()
    bench.troubles.clear()
    until(lambda: bool(bench.gate.mend() or not bench.gate.why_closed()), 10)
    bench.gate.mend()

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("takes no work: store: ")
    assert said[1] == "takes work again"


def test_each_runs_engine_is_looked_at_once(bench: Bench) -> None:
    for run in ("home", "other", "home", "other"):
        bench.do(bench.gate.admit(run))

    assert bench.looked_at == ["home", "other"]


def test_an_engine_that_was_gone_is_asked_nothing_before_it_was_looked_at_again(
    bench: Bench, engine: FakeEngine
) -> None:
    bench.do(bench.gate.admit("home"))
    bench.gate.mend()
    looked_at = len(bench.looked_at)

    engine.die()
    bench.gate.mend()
    while_away = (bench.gate.why_closed(), bench.gate.is_admitted("home"))
    with pytest.raises(EngineUnavailable):
        bench.do(bench.gate.admit("home"))
    engine.revive()
    bench.gate.mend()

    assert looked_at == 1
    assert while_away == ("engine: it is gone, and not back yet", False)
    assert bench.looked_at == ["home", "home"]
    assert bench.gate.why_closed() is None
    assert bench.gate.is_admitted("home")


def test_a_death_is_told_once_to_all_who_work(bench: Bench, engine: FakeEngine) -> None:
    bench.do(bench.gate.admit("home"))
    told: list[str] = []
    engine.die()

    with bench.gate.telling_of_deaths(told.append), bench.gate.telling_of_deaths(told.append):
        bench.do(bench.engine.died())
        for _ in range(2):
            bench.gate.note_death("connection reset")

    assert told == ["connection reset"] * 2
    assert not bench.gate.is_admitted("home")
    assert bench.gate.why_closed() == "engine: it is gone, and not back yet"


def test_another_model_behind_the_port_closes_the_gate_until_it_is_gone(
    bench: Bench, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.do(bench.gate.admit("home"))
    engine.die()
    bench.gate.mend()
    bench.troubles["engine"] = BadInput("this engine is not tiny")
    engine.revive()

    for _ in range(3):
        bench.gate.mend()
    looked_at, why = list(bench.looked_at), bench.gate.why_closed()
    bench.troubles.clear()
    monkeypatch.setattr(gate_module, "REFUSED_AGAIN_S", 0.0)
    bench.gate.mend()

    assert looked_at == ["home", "home"]
    assert why == "this engine is not tiny"
    assert bench.gate.why_closed() is None
    assert bench.gate.is_admitted("home")


def test_an_engine_that_is_stuck_counts_as_dead(bench: Bench) -> None:
    bench.do(bench.gate.admit("home"))
    told: list[str] = []

    with bench.gate.telling_of_deaths(told.append):
        bench.do(bench.gate.note_stuck("no token for 180 s"))

    assert told == ["no token for 180 s"]
    assert bench.gate.has_died


def test_a_full_disk_closes_the_gate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_MIN_FREE_BYTES", 1 << 62)
    bench.gate.mend()
    why = bench.gate.why_closed()
    monkeypatch.setattr(gate_module, "_MIN_FREE_BYTES", 1)
    bench.gate.mend()

    assert why == "disk: nearly full"
    assert bench.gate.why_closed() is None


def test_an_engine_that_calls_itself_unhealthy_is_admitted_for_a_new_run(
    bench: Bench, engine: FakeEngine
) -> None:
    engine.is_healthy = False

    bench.do(bench.gate.admit("home"))

    assert bench.gate.is_admitted("home")


def test_a_death_that_only_the_next_look_finds_is_told_and_does_not_keep_the_engine_out(
    bench: Bench, engine: FakeEngine
) -> None:
    bench.do(bench.gate.admit("home"))
    told: list[str] = []
    engine.die()
    engine.revive()

    with bench.gate.telling_of_deaths(told.append):
        bench.do(bench.gate.admit("another"))

    assert told == ["its process was replaced by another"]
    assert bench.gate.is_admitted("another")
    assert not bench.gate.is_admitted("home")
