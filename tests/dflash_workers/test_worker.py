"""Whole worker processes: what they refuse at the start, how they die, how they say goodbye."""

from __future__ import annotations

import base64
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import orjson
import pytest
import redis

from dflash_workers.contract.commit import read_commit, read_rows
from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import AccessDenied, BadInput, EngineUnavailable, Missing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.opening import Options, check_store
from dflash_workers.worker import Worker, _repeat, batches_at_once, largest_batch
from tests.batches import is_committed, until
from tests.fake_engine import FakeEngine
from tests.faults.http_proxy import HttpProxy, Rule
from tests.planned import Plan, prompt

ROOT = Path(__file__).parent.parent.parent

# A process as `dflash-fleet worker` starts it, but with short leases and three batches at once.
PROCESS = """
import dataclasses
from dflash_workers.contract.settings import load_settings
from dflash_workers.logs import set_up_logs
from dflash_workers.worker import Worker
from tests.dflash_workers.conftest import OPTIONS
set_up_logs()
app = Worker(load_settings({}), dataclasses.replace(OPTIONS, num_batches=3)).make_app()
app.worker_main(["worker", "--without-gossip", "--without-mingle"])
"""

CLI = ("-c", "from dflash_workers.cli import app; app()", "worker")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(worker_settings: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts worker processes; their logs are printed if the test fails."""
    children: list[subprocess.Popen[bytes]] = []
    logs = []

    def start(slot: str, *command: str, **values: str) -> subprocess.Popen[bytes]:
        settings = dataclasses.replace(worker_settings, slot=slot, **values)  # type: ignore[arg-type]
        environ = os.environ | settings.environment()
        environ = {k: v for k, v in environ.items() if v} | {"OMP_NUM_THREADS": "1"}
        logs.append(tmp_path / f"{slot}.log")
        with logs[-1].open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, *(command or ("-c", PROCESS))],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
    for log in logs:
        print(log.name, log.read_text(), sep="\n")


def contents(store: Store, message: BatchMessage) -> list[str]:
    commit = read_commit(store, message.run, message.segment, message.batch)
    return [a.content for row in read_rows(store, commit) for a in row.answers]


@pytest.mark.slow
def test_a_batch_of_a_killed_worker_is_finished_by_another_without_repeating_what_ended(
    plan: Plan, start: Start, engine: FakeEngine, store: Store, hints: Hints
) -> None:
    prompts = [
        prompt("say:a", "say:b"),
        prompt("say:c", "wait=0.9 say:d"),
        prompt("wait=0.9 say:e"),
    ]
    (message,) = plan.add(prompts)
    hints.offer([message], plan.queue)
    victim = start("victim")
    until(lambda: {"say:b", "wait=0.9 say:d", "wait=0.9 say:e"} <= set(engine.asked))
    journal = hints.keys.journal(message.run, batch_name(message.segment, message.batch))
    until(lambda: hints.redis.hlen(journal) == 3)

    victim.kill()
    start("heir")
    until(lambda: is_committed(store, message))

    assert contents(store, message) == ["a", "b", "c", "d", "e"]
    finished = [m for m in engine.asked if not m.startswith("wait")]
    assert sorted(finished) == ["say:a", "say:b", "say:c"]


@pytest.mark.slow
def test_sigterm_gives_the_batches_back_first_in_line_within_two_seconds(
    plan: Plan,
    start: Start,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    redis_client: redis.Redis,
) -> None:
    first, second, third = plan.add(
        [prompt("say:done"), prompt("wait=30 a")], [prompt("wait=30 b")], [prompt("wait=30 c")]
    )
    messages = [first, second, third]
    hints.offer(messages, plan.queue)
    child = start("leaver")
    journal = hints.keys.journal(first.run, batch_name(first.segment, first.batch))
    until(lambda: engine.running == 3 and hints.redis.hlen(journal) == 1)
    hints.offer([BatchMessage(first.run, 0, "waiting-behind")], plan.queue)

    child.send_signal(signal.SIGTERM)
    started = time.monotonic()
    until(lambda: redis_client.llen(plan.queue) == 3)  # priority 0: before what waits behind
    took_s = time.monotonic() - started
    code = child.wait(10)

    assert code == 0
    assert took_s < 2
    assert len(set(engine.aborted)) == 3
    assert hints.redis.zcard(hints.keys.inflight(first.run)) == 0
    names = {batch_name(m.segment, m.batch).encode() for m in messages}
    assert names < set(redis_client.zrange(hints.keys.pending(first.run), 0, -1))
    assert redis_client.hlen(journal) == 2  # what had ended, and what an aborted answer had
    assert not redis_client.exists(hints.keys.worker("leaver"))


@pytest.mark.slow
def test_within_its_grace_a_worker_ends_what_runs_and_gives_back_what_waits(
    plan: Plan, start: Start, engine: FakeEngine, store: Store, hints: Hints
) -> None:
    first, second = plan.add([prompt("wait=1.5"), prompt("say:done")], [prompt("wait=60")])
    hints.offer([first, second], plan.queue)
    child = start("patient", *CLI, "--grace-s", "6")
    until(lambda: engine.running == 2)

    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    code = child.wait(20)
    took_s = time.monotonic() - started

    assert code == 0
    assert 6 < took_s < 10
    assert is_committed(store, first)
    assert not is_committed(store, second)
    assert len(engine.aborted) == 1
    assert hints.redis.zcard(hints.keys.inflight(first.run)) == 0


@pytest.mark.slow
def test_a_worker_killed_while_s3_refuses_its_commit_costs_no_token(
    plan: Plan,
    start: Start,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    worker_settings: Settings,
) -> None:
    (message,) = plan.add([prompt(f"say:{number}", "say:again") for number in range(5)])
    where = urlsplit(worker_settings.s3_endpoint)
    with HttpProxy((str(where.hostname), where.port or 80)) as proxy:
        proxy.rules.append(Rule("PUT", "/commits/", status=503, code="SlowDown", num_left=-1))
        hints.offer([message], plan.queue)
        victim = start("victim", s3_endpoint=f"http://127.0.0.1:{proxy.port}")
        until(lambda: proxy.rules[0].num_met > 0)
        victim.kill()
        victim.wait()
    num_asked = len(engine.asked)

    start("heir")
    until(lambda: is_committed(store, message))

    assert num_asked == len(engine.asked) == 10
    assert contents(store, message)[::2] == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
def test_what_celery_can_not_read_is_counted_and_ends_no_worker(
    plan: Plan, start: Start, hints: Hints, redis_client: redis.Redis, store: Store
) -> None:
    (message,) = plan.add([prompt("say:a")])
    hints.offer([message], plan.queue)
    (key,) = redis_client.keys(f"{plan.queue}*")
    entry = redis_client.lpop(key)
    assert isinstance(entry, bytes)
    readable = orjson.loads(entry)
    body = base64.b64encode(b"{not json").decode()
    unreadable: list[dict[str, object]] = [
        readable | {"body": body},
        readable | {"body": "%%%"},
        readable | {"content-type": "application/x-python-serialize"},
        readable | {"headers": readable["headers"] | {"task": "nobody's"}},
        readable | {"headers": {}, "body": body},
    ]
    raw = [b"\xff\xfe no text", b"{not json", entry[:-9], b"[]"]

    start("reader")
    for letter in [*map(orjson.dumps, unreadable), *raw]:
        redis_client.lpush(key, letter)
    redis_client.lpush(key, entry)

    until(lambda: is_committed(store, message))
    heartbeat = hints.keys.worker("reader")
    until(lambda: redis_client.hget(heartbeat, "unreadable") == b"9")
    assert redis_client.llen(hints.keys.dead("message")) == 9
    assert hints.redis.hlen("unacked") == 0


@pytest.mark.slow
def test_a_paused_runs_hints_are_dropped_in_passing_and_keep_no_other_run_waiting(
    plan: Plan, start: Start, hints: Hints, store: Store, redis_client: redis.Redis
) -> None:
    plan.add([prompt("say:paused")])
    other = Plan(store, hints, dataclasses.replace(plan.spec, run=f"{plan.spec.run}-other"))
    (message,) = other.add([prompt("say:a")])
    Control(store, plan.spec.run).order(Action.PAUSE)
    waiting = [BatchMessage(plan.spec.run, 0, f"{number:016x}") for number in range(300)]
    hints.offer(waiting, plan.queue)
    hints.offer([message], plan.queue)

    child = start("dropper")
    until(lambda: hints.num_queued(plan.queue) < len(waiting))
    before_s, began_s = cpu_s(child.pid), time.monotonic()
    until(lambda: is_committed(store, message))
    took_s, used_s = time.monotonic() - began_s, cpu_s(child.pid) - before_s
    time.sleep(2)
    idle_s = cpu_s(child.pid) - before_s - used_s

    assert took_s < 60
    assert used_s < len(waiting) * 0.03
    assert idle_s < 0.5
    heartbeat = hints.keys.worker("dropper")
    until(lambda: redis_client.hget(heartbeat, "dropped") == b"300")
    assert redis_client.zcard(hints.keys.pending(plan.spec.run)) == 300  # `resume` sends these


def cpu_s(pid: int) -> float:
    """What the process has used of the processors so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(
    plan: Plan, start: Start, engine: FakeEngine, hints: Hints
) -> None:
    (message,) = plan.add([prompt("wait=30")])
    hints.offer([message], plan.queue)
    child = start("hasty")
    until(lambda: engine.running == 1)

    child.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    child.send_signal(signal.SIGTERM)

    assert child.wait(5) in (0, 1)


@pytest.mark.slow
def test_the_command_works_a_run_off_and_leaves_when_idle(
    plan: Plan, start: Start, engine: FakeEngine, hints: Hints, store: Store
) -> None:
    messages = plan.add([prompt("say:a")], [prompt("say:b")], sealed=True)
    hints.offer(messages, plan.queue)

    child = start("cli", *CLI, "--idle-exit-s", "6")

    assert child.wait(60) == 0
    assert all(is_committed(store, message) for message in messages)
    progress = orjson.loads(store.get(RunKeys(plan.spec.run).progress))
    assert (progress["status"], progress["completed"]) == ("done", 2)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [("-P", "threads", "-c", "2"), ()])
def test_celery_finds_the_app_its_queue_and_its_pool(
    plan: Plan, start: Start, hints: Hints, store: Store, pool: tuple[str, ...]
) -> None:
    (message,) = plan.add([prompt("say:a")])
    hints.offer([message], plan.queue)

    alone = ("--without-gossip", "--without-mingle")
    child = start("celery", "-m", "celery", "-A", "dflash_workers.app", "worker", *alone, *pool)
    until(lambda: is_committed(store, message))

    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0


def test_a_worker_says_that_it_lives(
    plan: Plan, make_worker: Callable[..., Worker], redis_client: redis.Redis, hints: Hints
) -> None:
    plan.add([prompt("say:a")])

    make_worker("alive")

    key = hints.keys.worker("alive")
    until(lambda: bool(redis_client.exists(key)))
    facts = cast("dict[bytes, bytes]", redis_client.hgetall(key))
    assert facts.pop(b"process").startswith(b"%d-" % os.getpid())
    # What its engine said at the start: the canary, and whether it heeds the thinking switch.
    assert float(facts.pop(b"uptime_s")) >= 0
    assert int(facts.pop(b"replies")) > 0 and int(facts.pop(b"tokens")) > 0
    assert facts == {
        b"state": b"up",
        b"batches": b"0",
        b"in_flight": b"0",
        b"tokens_per_s": b"0.0",
        b"dropped": b"0",
        b"foreign": b"0",
        b"unreadable": b"0",
        b"dead": b"0",
    }
    assert 0 < redis_client.ttl(key) <= 15


@pytest.mark.parametrize(
    ("batch_size", "max_in_flight", "num_batches"),
    [(64, 48, 8), (256, 48, 3), (64, 128, 20), (64, 256, 40), (1, 48, 64), (64, 1, 3)],
)
def test_enough_batches_run_at_once_to_keep_the_engine_full(
    batch_size: int, max_in_flight: int, num_batches: int
) -> None:
    assert batches_at_once(batch_size, max_in_flight) == num_batches


@pytest.mark.parametrize(("wanted_s", "is_soon"), [(0.01, True), (None, False), (3600.0, False)])
def test_what_a_thread_repeats_comes_at_once_and_before_its_turn_where_it_asks_for_it(
    wanted_s: float | None, is_soon: bool
) -> None:
    stop, began_s = threading.Event(), time.monotonic()
    came_s: list[float] = []

    def step() -> float | None:
        came_s.append(time.monotonic())
        if len(came_s) == 3:
            stop.set()
        return wanted_s

    _repeat(step, 0.4, stop)

    assert came_s[0] - began_s < 0.4
    assert (came_s[2] - came_s[0] < 0.8) == is_soon


def test_the_plan_says_how_large_batches_are(plan: Plan, store: Store) -> None:
    with_nothing_planned = largest_batch(store, plan.spec.run)
    plan.add()
    plan.add([prompt("a")], [prompt("b"), prompt("c"), prompt("d")])

    assert with_nothing_planned == 64
    assert largest_batch(store, plan.spec.run) == 3


def test_an_engine_of_another_model_is_refused_at_the_start(
    plan: Plan, worker_settings: Settings, engine: FakeEngine, make_worker: Callable[..., Worker]
) -> None:
    plan.add([prompt("say:a")])
    make_worker()
    engine.noise = 5.0

    with pytest.raises(BadInput, match="this engine is not tiny"):
        Worker(worker_settings, Options())


def test_a_model_of_another_target_is_refused_by_the_fields_name(
    plan: Plan, worker_settings: Settings, store: Store
) -> None:
    target = dataclasses.replace(plan.spec.target, tokenizer_sha256="0" * 64)
    store.put_new(RunKeys(plan.spec.run).spec, dump(dataclasses.replace(plan.spec, target=target)))

    with pytest.raises(BadInput, match=r"target\.tokenizer_sha256"):
        Worker(worker_settings, Options())


def test_what_is_missing_at_the_start_is_said(
    plan: Plan, worker_settings: Settings, store: Store
) -> None:
    with pytest.raises(Missing, match="there is no run"):
        Worker(worker_settings, Options())
    plan.add([prompt("say:a")])
    away = dataclasses.replace(worker_settings, engine_url="http://127.0.0.1:1")
    with pytest.raises(EngineUnavailable, match=r"no engine within 0 s"):
        Worker(away, Options(wait_s=0.2))
    with pytest.raises(AccessDenied):
        Worker(dataclasses.replace(worker_settings, s3_secret_key="wrong"), Options())


def test_an_s3_that_overwrites_is_refused(store: Store) -> None:
    def forget(params: dict[str, object], **_: object) -> None:
        params.pop("IfNoneMatch", None)

    check_store(store, "run")
    store.client.meta.events.register("provide-client-params.s3.PutObject", forget)

    with pytest.raises(BadInput, match="If-None-Match"):
        check_store(store, "run")
    assert list(store.list("run/")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "is_on", "said"),
    [
        ("musealways", False, "with thinking off, a short answer thinks all the same"),
        ("", True, "with thinking on, a short answer shows no sign of it"),
    ],
)
def test_a_worker_says_at_its_start_that_its_engine_does_not_heed_the_thinking_switch(
    plan: Plan,
    start: Start,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    tmp_path: Path,
    manner: str,
    is_on: bool,
    said: str,
) -> None:
    engine.manner = manner
    plan.spec = dataclasses.replace(plan.spec, template_kwargs={"enable_thinking": is_on})
    (message,) = plan.add([prompt("say:a")])
    hints.offer([message], plan.queue)

    start("w1", *CLI)
    until(lambda: "committed" in (tmp_path / "w1.log").read_text())

    log = (tmp_path / "w1.log").read_text()
    assert is_committed(store, message)
    assert f"WARNING dflash_workers.opening: run {message.run!r}: {said}" in log
    assert log.index(said) < log.index("committed")
