"""Whole worker processes: what they refuse at the start, how they die, how they say goodbye."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
import redis

from dflash_workers.contract.commit import read_commit, read_rows
from dflash_workers.contract.errors import AccessDenied, BadInput, EngineUnavailable, Missing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.worker import Options, Worker, check_store
from tests.batches import is_committed, until
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

ROOT = Path(__file__).parent.parent.parent

# A process as `dflash-fleet worker` starts it, but with short leases.
PROCESS = """
from dflash_workers.contract.settings import load_settings
from dflash_workers.logs import set_up_logs
from dflash_workers.worker import Worker
from tests.dflash_workers.conftest import OPTIONS
set_up_logs()
app = Worker(load_settings({}), OPTIONS).make_app()
app.worker_main(["worker", "-P", "threads", "-c", "3", "--without-gossip", "--without-mingle"])
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(worker_settings: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts worker processes; their logs are printed if the test fails."""
    children: list[subprocess.Popen[bytes]] = []
    logs = []

    def start(slot: str, *command: str) -> subprocess.Popen[bytes]:
        environ = os.environ | dataclasses.replace(worker_settings, slot=slot).environment()
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
    code = child.wait(10)
    took_s = time.monotonic() - started

    assert code == 0
    assert took_s < 2
    assert len(set(engine.aborted)) == 3
    assert hints.redis.zcard(hints.keys.inflight(first.run)) == 0
    names = {batch_name(m.segment, m.batch).encode() for m in messages}
    assert names < set(redis_client.zrange(hints.keys.pending(first.run), 0, -1))
    assert redis_client.llen(plan.queue) == 3  # priority 0: before what waits behind
    assert redis_client.hlen(journal) == 1
    assert not redis_client.exists(hints.keys.worker("leaver"))


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

    command = "from dflash_workers.cli import app; app()"
    child = start("cli", "-c", command, "worker", "--idle-exit-s", "6")

    assert child.wait(60) == 0
    assert all(is_committed(store, message) for message in messages)
    progress = orjson.loads(store.get(RunKeys(plan.spec.run).progress))
    assert (progress["status"], progress["completed"]) == ("done", 2)


@pytest.mark.slow
def test_celery_finds_the_app_and_its_queue(
    plan: Plan, start: Start, engine: FakeEngine, hints: Hints, store: Store
) -> None:
    (message,) = plan.add([prompt("say:a")])
    hints.offer([message], plan.queue)

    child = start("celery", "-m", "celery", "-A", "dflash_workers.app", "worker", "-P", "threads")
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
    assert set(redis_client.hgetall(key)) == {b"state", b"batches", b"in_flight", b"tokens_per_s"}
    assert 0 < redis_client.ttl(key) <= 15


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
    with pytest.raises(Missing, match="not planned"):
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
