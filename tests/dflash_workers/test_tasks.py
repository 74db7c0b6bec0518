"""What becomes of a hint: worked on, left to its holder, given back, dropped, kept for people."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterator
from threading import Thread
from urllib.parse import urlsplit

import pytest
import redis

from dflash_workers import tasks
from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import AccessDenied, StoreUnavailable
from dflash_workers.contract.hints import Hints, task_id
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import encode
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.pace import Patience
from dflash_workers.tasks import take
from dflash_workers.worker import Worker
from tests.batches import MakeWorker, commit_of, cut_off, is_committed, left_in_redis, until, work
from tests.dflash_workers.conftest import OPTIONS
from tests.fake_engine import FakeEngine
from tests.faults.proxy import Mode, Proxy
from tests.planned import Plan, prompt


def test_an_engine_that_stays_away_costs_nothing_that_ended(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine, hints: Hints
) -> None:
    (message,) = plan.add([prompt("say:kept"), prompt("fail=1000")])
    worker = make_worker()

    work(worker, message).join()
    assert not is_committed(store, message)
    assert hints.queued_names(plan.queue) == {task_id(message)}
    engine._failures["fail=1000"] = 1000
    work(worker, message).join()

    assert commit_of(store, message).num_rows == 2
    assert engine.asked.count("say:kept") == 1


@pytest.fixture
def half_done(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> Iterator[tuple[Worker, str]]:
    """A worker with a batch of which one answer is about to end and one is not, and its journal."""
    (message,) = plan.add([prompt("wait=0.4 say:kept"), prompt("wait=60")])
    patience = dataclasses.replace(OPTIONS.patience, request_s=60)
    worker = make_worker("w1", dataclasses.replace(OPTIONS, patience=patience))
    thread = work(worker, message)
    until(lambda: engine.running == 2)
    keys = worker.site.hints.keys
    yield worker, keys.journal(message.run, batch_name(message.segment, message.batch))
    assert engine.running == 1
    Control(store, plan.spec.run).order(Action.CANCEL)
    thread.join(10)


def test_what_ended_while_redis_was_away_is_noted_as_soon_as_it_is_back(
    half_done: tuple[Worker, str], redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    worker, journal = half_done
    pool = worker.site.journals.redis.connection_pool
    port = pool.connection_kwargs["port"]
    cut_off(worker.site.journals.redis)
    until(lambda: "journal pauses, 1 rows kept" in caplog.text)

    pool.connection_kwargs["port"] = port
    pool.reset()

    until(lambda: redis_client.hlen(journal) == 1, 10)  # no other turn ends meanwhile


def test_what_redis_lost_of_a_batch_that_runs_is_noted_again_by_its_holder(
    half_done: tuple[Worker, str], redis_client: redis.Redis, hints: Hints
) -> None:
    _worker, journal = half_done
    until(lambda: redis_client.hlen(journal) == 1)

    redis_client.delete(*redis_client.scan_iter(f"{hints.keys.prefix}*"))

    until(lambda: redis_client.hlen(journal) == 1, 10)  # no other turn ends meanwhile


def test_two_workers_of_one_slot_cost_no_batch_and_no_token(
    plan: Plan,
    make_worker: MakeWorker,
    store: Store,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = plan.add([prompt("wait=0.6 say:a")], [prompt("wait=0.6 say:b")])
    patient = dataclasses.replace(OPTIONS, patience=Patience(request_s=60))
    running = [work(make_worker("w1", patient), message) for message in (first, second)]
    until(lambda: "another process is worker 'w1' too" in caplog.text)

    for thread in running:
        thread.join()

    assert is_committed(store, first)
    assert is_committed(store, second)
    assert len(engine.asked) == 2


def test_a_batch_that_is_held_is_left_alone(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    (message,) = plan.add([prompt("wait=0.5")])
    holder, other = make_worker("w1"), make_worker("w2")
    held = work(holder, message)
    until(lambda: engine.running == 1)

    work(other, message).join()

    assert held.is_alive()
    held.join()
    assert len(engine.asked) == 1


def test_a_paused_run_ends_what_it_has_claimed_and_claims_nothing_new(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> None:
    first, second = plan.add([prompt("wait=0.5")], [prompt("say:later")])
    worker, control = make_worker(), Control(store, plan.spec.run)
    running = work(worker, first)
    until(lambda: engine.running == 1)

    control.order(Action.PAUSE)
    work(worker, second).join()
    running.join()
    while_paused = (is_committed(store, first), is_committed(store, second))
    control.order(Action.RESUME)
    work(worker, second).join()

    assert while_paused == (True, False)
    assert worker.site.runs.num_dropped == 1
    assert is_committed(store, second)


def test_a_cancelled_run_is_given_up_within_seconds_and_leaves_nothing_in_redis(
    plan: Plan,
    make_worker: MakeWorker,
    store: Store,
    engine: FakeEngine,
    hints: Hints,
    redis_client: redis.Redis,
) -> None:
    first, second = plan.add([prompt("wait=60"), prompt("say:done")], [prompt("say:never")])
    worker = make_worker()
    running = work(worker, first)
    until(lambda: engine.running == 1)

    Control(store, plan.spec.run).order(Action.CANCEL)
    running.join(timeout=5)
    work(worker, second).join()

    assert not running.is_alive()
    assert engine.running == 0
    assert not is_committed(store, first)
    assert not is_committed(store, second)
    assert left_in_redis(redis_client, hints) == []
    assert hints.num_queued(plan.queue) == 0


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"run": "R", "segment": 0, "batch": "b", "schema": 99}, "schema"),
        ({"run": "R", "segment": 0, "batch": "b", "colour": "red"}, "schema"),
        ({"args": (1, 2)}, "schema"),
        ({"run": "nobody", "segment": 0, "batch": "b"}, "plan"),
        ({"run": "R", "segment": 7, "batch": "never planned"}, "plan"),
    ],
)
def test_a_hint_that_can_never_be_worked_on_is_kept_for_people(
    plan: Plan,
    make_worker: MakeWorker,
    hints: Hints,
    redis_client: redis.Redis,
    facts: dict[str, object],
    reason: str,
) -> None:
    plan.add([prompt("say:x")])
    worker = make_worker()

    take({k: plan.spec.run if v == "R" else v for k, v in facts.items()}, worker.site)

    assert redis_client.llen(hints.keys.dead(reason)) == 1
    assert redis_client.zcard(hints.keys.inflight(plan.spec.run)) == 0


def test_a_hint_of_another_target_goes_home_and_is_counted(
    plan: Plan,
    make_worker: MakeWorker,
    hints: Hints,
    store: Store,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan.add([prompt("say:x")])
    other = dataclasses.replace(plan.spec.target, weights_sha256=uuid.uuid4().hex)
    spec = dataclasses.replace(plan.spec, run="other-run", target=other)
    others = Plan(store, hints, spec)
    (message,) = others.add([prompt("say:elsewhere")])
    worker = make_worker()
    monkeypatch.setattr(tasks, "_FOREIGN_PAUSE_S", 0.3)

    started = time.monotonic()
    take(encode(message), worker.site)
    took_s = time.monotonic() - started

    assert took_s >= 0.3
    assert hints.queued_names(others.queue) == {f"other-run/0/{message.batch}"}
    assert hints.num_queued(plan.queue) == 0
    assert redis_client.keys(hints.keys.dead("*")) == []
    until(lambda: redis_client.hget(hints.keys.worker("w1"), "foreign") == b"1")


def test_with_its_gate_closed_a_worker_gives_the_hint_back_and_takes_none_until_it_opens(
    plan: Plan, make_worker: MakeWorker, hints: Hints, store: Store, redis_client: redis.Redis
) -> None:
    (message,) = plan.add([prompt("say:later")])
    worker = make_worker()
    for _ in range(20):
        worker.site.gate.record("store", False)

    thread = work(worker, message)
    until(lambda: hints.num_queued(plan.queue) == 1)
    state = hints.keys.worker("w1")
    until(lambda: (redis_client.hget(state, "state") or b"").startswith(b"paused: store: "))
    is_waiting = thread.is_alive()
    thread.join(30)  # the breaker lets the worker try S3 after a pause, and S3 is there

    assert is_waiting
    assert not is_committed(store, message)
    until(lambda: redis_client.hget(state, "state") == b"up")
    work(worker, message).join()
    assert is_committed(store, message)


def test_a_hint_that_could_not_be_worked_on_is_back_before_its_slot_pauses(
    plan: Plan, make_worker: MakeWorker, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    (message,) = plan.add([prompt("say:x")])
    worker = make_worker()

    def throttled(*_: object) -> None:
        raise StoreUnavailable("503 SlowDown")

    monkeypatch.setattr(worker.site.store.__class__, "get_range", throttled)
    thread = Thread(target=take, args=(encode(message), worker.site), kwargs={"pause_s": 3600})
    thread.start()
    until(lambda: hints.num_queued(plan.queue) == 1)

    assert thread.is_alive()
    worker.site.holds.draining.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_hint_taken_from_a_redis_that_then_went_away_goes_back_once_it_is_there(
    plan: Plan, worker_settings: Settings, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = plan.add([prompt("say:x")])
    where = urlsplit(worker_settings.redis_url)
    with Proxy((str(where.hostname), where.port or 6379)) as proxy:
        through = worker_settings.redis_url.replace(f":{where.port}", f":{proxy.port}")
        worker = Worker(dataclasses.replace(worker_settings, redis_url=through), OPTIONS)
        proxy.set(Mode.REFUSE)

        thread = work(worker, message)
        until(lambda: f"hint of {message.batch} waits here" in caplog.text)
        proxy.set(Mode.PASS)
        thread.join(20)

        assert not thread.is_alive()
        assert hints.num_queued(plan.queue) == 1
        worker.start()
        worker.stop()
        worker.site.hints.app.close()


def test_an_s3_that_refuses_for_now_costs_no_hint(
    plan: Plan, make_worker: MakeWorker, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    (message,) = plan.add([prompt("say:x")])
    worker = make_worker()

    def expired(*_: object) -> None:
        raise AccessDenied("the token has expired")

    monkeypatch.setattr(worker.site.store.__class__, "get_range", expired)
    work(worker, message).join()

    assert hints.num_queued(plan.queue) == 1
