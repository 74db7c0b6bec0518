"""What a sweep sees and what it does about it."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from dflash_workers import watchdog
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.hints import Hints
from dflash_workers.goodbye import Goodbye
from dflash_workers.opening import Options
from dflash_workers.vitals import Limits, Vitals
from dflash_workers.worker import Worker
from tests.batches import cut_off, until, work
from tests.dflash_workers.conftest import OPTIONS
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

HASTY = watchdog.Limits(reconnect_s=0.2, exit_s=0.3, engine_s=0.4)


class Consumer:
    """As much of Celery's as a reconnecting needs."""

    connection: object | None = object()

    def __init__(self) -> None:
        self.num_dropped = 0

    def call_soon(self, drop: Callable[[], None], /) -> object:
        with pytest.raises(ConnectionError):
            drop()
        self.num_dropped += 1
        return None


@pytest.fixture
def worker(plan: Plan, make_worker: Callable[..., Worker]) -> Worker:
    """One whose own sweeps don't disturb."""
    plan.add([prompt("say:planned")])
    timing = dataclasses.replace(OPTIONS.timing, reap_every_s=3600)
    return make_worker("w1", dataclasses.replace(OPTIONS, timing=timing))


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The SIGTERMs that this process sends itself."""
    heard: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, earlier)


def make_vitals(worker: Worker, limits: Limits) -> tuple[Vitals, Goodbye]:
    goodbye = Goodbye(worker.site.holds, 0.0)
    vitals = Vitals(worker.site, goodbye, limits)
    vitals.num_slots = 2
    return vitals, goodbye


def sweep_for(vitals: Vitals, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        vitals.sweep()
        time.sleep(0.02)


def test_a_worker_that_gets_no_message_connects_anew_and_then_leaves_with_an_error(
    worker: Worker, plan: Plan, hints: Hints, signals: list[int]
) -> None:
    vitals, goodbye = make_vitals(worker, Limits(watchdog=HASTY))
    vitals.consumer = consumer = Consumer()
    hints.redis.lpush(plan.queue, "a message that nobody takes")

    sweep_for(vitals, 0.35)
    after_a_while = (consumer.num_dropped, list(signals))
    sweep_for(vitals, 0.6)

    assert after_a_while == (1, [])
    assert signals == [signal.SIGTERM]
    assert goodbye.exit_code == 1


def test_a_worker_whose_slots_are_taken_waits_for_no_message(
    worker: Worker, plan: Plan, hints: Hints, signals: list[int]
) -> None:
    vitals, _goodbye = make_vitals(worker, Limits(watchdog=HASTY))
    hints.redis.lpush(plan.queue, "a message that nobody takes")

    with worker.site.tally.busy(), worker.site.tally.busy():
        sweep_for(vitals, 1)

    assert signals == []


def test_an_engine_that_gives_nothing_is_taken_for_dead(
    worker: Worker, plan: Plan, engine: FakeEngine
) -> None:
    vitals, _goodbye = make_vitals(worker, Limits(watchdog=HASTY))
    (message,) = plan.add([prompt("wait=0.95")])
    thread = work(worker, message)
    until(lambda: engine.running == 1)

    until(lambda: vitals.sweep() > 0 and worker.site.engine.num_deaths > 0, 5)

    assert worker.site.engine.num_deaths == 1
    thread.join()


def test_a_worker_without_work_leaves_when_it_was_told_to(
    worker: Worker, signals: list[int]
) -> None:
    vitals, goodbye = make_vitals(worker, Limits(idle_exit_s=0.3))

    sweep_for(vitals, 0.2)
    early = list(signals)
    sweep_for(vitals, 0.4)

    assert early == []
    assert signals == [signal.SIGTERM]
    assert goodbye.exit_code == 0


def test_with_redis_away_the_watchdog_looks_all_the_same(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    vitals, _goodbye = make_vitals(worker, Limits())
    views: list[watchdog.View] = []
    # This one's alone: the worker has a sweep of its own, which goes on beside it.
    monkeypatch.setattr(vitals._watchdog, "look", lambda view, _now: views.append(view) or Any)
    cut_off(worker.site.hints.redis)

    with pytest.raises(QueueUnavailable):
        vitals.sweep()

    assert [view.num_queued for view in views] == [None]


def test_the_heartbeat_says_what_runs_though_no_message_waits(
    worker: Worker, plan: Plan, engine: FakeEngine, redis_client: redis.Redis, hints: Hints
) -> None:
    vitals, _goodbye = make_vitals(worker, Limits())
    (message,) = plan.add([prompt("wait=0.9 a"), prompt("wait=0.9 b")])
    thread = work(worker, message)
    until(lambda: engine.running == 2)

    vitals.sweep()

    facts = redis_client.hgetall(hints.keys.worker("w1"))
    assert (facts[b"batches"], facts[b"in_flight"]) == (b"1", b"2")
    thread.join()
    vitals.leave()
    assert not redis_client.exists(hints.keys.worker("w1"))


def test_the_next_sweep_is_due_when_the_next_deadline_is_over(worker: Worker, plan: Plan) -> None:
    vitals, _goodbye = make_vitals(worker, Limits())
    (message,) = plan.add([prompt("say:held")])

    with_nothing_in_flight = vitals.sweep()
    assert worker.site.claims.claim(message)

    assert with_nothing_in_flight == math.inf
    assert 0.8 < vitals.sweep() < 1.3


def test_two_processes_of_one_slot_are_told_so_and_leave_each_others_heartbeat(
    worker: Worker,
    hints: Hints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = (make_vitals(worker, Limits())[0] for _ in range(2))

    one.sweep()
    other.sweep()  # as after a restart: the first may be dead
    other.sweep()
    after_a_restart = caplog.text
    one.sweep()
    other.leave()

    assert "another process" not in after_a_restart
    assert caplog.text.count("another process is worker 'w1' too") == 1
    assert hints.redis.exists(hints.keys.worker("w1"))
    one.leave()
    assert not hints.redis.exists(hints.keys.worker("w1"))


def test_a_notice_leaves_no_more_grace_than_time(worker: Worker, signals: list[int]) -> None:
    assert Options().grace_s == 0.0
    goodbye = Goodbye(worker.site.holds, 60.0)

    goodbye.ask("aws: spot terminate", left_s=30.0)
    goodbye.ask("again", left_s=5.0)

    assert signals == [signal.SIGTERM]
    assert goodbye.grace_s == 28.0
