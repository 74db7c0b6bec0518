"""Redis goes away, comes back, is emptied, is full or silent: no batch is lost or made twice."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import RunSpec
from producer.audit import audit
from tests.faults.fleet import Fleet
from tests.faults.processes import Process, until
from tests.faults.runs import KEPT_SLOT, FaultRun, prompts
from tests.planned import prompt

pytestmark = pytest.mark.slow


def test_a_busy_and_then_idle_worker_survives_five_restarts_of_redis_in_three_seconds(
    fleet: Fleet, run: FaultRun
) -> None:
    run.worker()
    (first,) = run.add(prompts(run, 8, "tokens=250"))
    until(lambda: len(fleet.engine().running()) == 8)

    for _ in range(5):
        fleet.redis.stop()
        fleet.redis.start()
    run.wait(first)
    for _ in range(5):
        fleet.redis.stop()
        fleet.redis.start()
    (second,) = run.add(prompts(run, 8, "after"))

    run.wait_with_supervisor("w1", second, timeout_s=60)
    run.prove()
    assert run.num_made_twice() == 0


@pytest.mark.parametrize("how", ["by the network", "by Redis"])
def test_a_worker_whose_idle_connections_are_cut_takes_the_next_batch(
    fleet: Fleet, shared_run: FaultRun, how: str
) -> None:
    run = shared_run
    run.keep_worker()
    time.sleep(1)  # idle, its consumer in a blocking read

    if how == "by the network":
        fleet.redis_proxy.cut()
    else:
        fleet.hints.redis.client_kill_filter(_type="normal", skipme=True)
    time.sleep(1)
    (message,) = run.add(prompts(run, 4, how))

    run.wait_with_supervisor(KEPT_SLOT, message, timeout_s=60)


def test_a_worker_takes_work_again_within_a_minute_after_redis_was_silent(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()

    fleet.redis.send(signal.SIGSTOP)
    time.sleep(35)  # longer than every timeout of its connections
    fleet.redis.send(signal.SIGCONT)
    (message,) = run.add(prompts(run, 4, "after the silence"))

    run.wait_with_supervisor(KEPT_SLOT, message, timeout_s=60)


def test_a_hint_that_comes_four_times_is_worked_on_once(fleet: Fleet, run: FaultRun) -> None:
    run.worker("w1")
    run.worker("w2")
    (message,) = run.add(prompts(run, 4, "tokens=200"))
    until(lambda: len(fleet.engine().running()) == 4)

    for _ in range(3):
        fleet.hints.give_back(message, run.queue)
    run.wait(message)

    until(lambda: fleet.hints.num_queued(run.queue) == 0)
    run.prove()
    assert len(run.asked()) == 4


def test_a_batch_longer_than_any_visibility_timeout_has_no_message_to_be_restored(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    (message,) = run.add(prompts(run, 2, "tokens=250"))

    until(lambda: len(fleet.engine().running()) == 2)

    assert fleet.hints.redis.hlen("unacked") == 0
    assert fleet.hints.redis.zcard("unacked_index") == 0
    run.wait(message)


def test_the_visibility_timeout_of_the_settings_is_the_one_of_the_live_channel(
    fleet: Fleet,
) -> None:
    with fleet.hints.app.connection_for_read() as connection:
        channel: Any = connection.default_channel  # of kombu's Redis transport
        assert channel.visibility_timeout == 6 * 3600


def test_no_batch_is_lost_by_workers_told_to_go_again_and_again(
    fleet: Fleet, run: FaultRun
) -> None:
    messages = run.add(*[prompts(run, 4, f"tokens=60 {number}") for number in range(12)])

    for _ in range(4):
        worker = run.worker()
        until(lambda: len(fleet.engine().running()) >= 8 or run.is_done(messages))
        worker.send(signal.SIGTERM)
        assert worker.wait(20) == 0
    run.worker()
    run.wait(*messages, timeout_s=90)

    run.prove()
    assert run.num_made_twice() == 0


def test_a_hint_of_a_batch_that_is_done_asks_the_engine_nothing(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    (message,) = run.add(prompts(run, 4, "once"))
    run.wait(message)
    inflight = fleet.hints.keys.inflight(run.name)
    until(lambda: fleet.hints.redis.zcard(inflight) == 0)

    started = time.monotonic()
    assert fleet.hints.offer([message], run.queue) == 1
    pending = fleet.hints.keys.pending(run.name)
    until(lambda: fleet.hints.redis.zcard(pending) + fleet.hints.redis.zcard(inflight) == 0)

    assert time.monotonic() - started < 2
    assert len(run.asked()) == 4


def test_a_full_redis_stops_hints_with_a_clear_error_and_no_batch_that_runs(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    (running,) = run.add(prompts(run, 4, "tokens=250"))
    until(lambda: len(fleet.engine().running()) == 4)

    fleet.hints.redis.config_set("maxmemory", "1mb")
    try:
        planned = run.plan.add(prompts(run, 4, "later"))
        with pytest.raises(QueueUnavailable, match=r"OOM|maxmemory"):
            fleet.hints.offer(planned, run.queue)
        run.wait(running)
    finally:
        fleet.hints.redis.config_set("maxmemory", "0")
    run.reconcile()

    run.wait_with_supervisor(KEPT_SLOT, *planned, timeout_s=60)
    run.prove()


def test_redis_keeps_nothing_of_batches_that_are_done(fleet: Fleet, shared_run: FaultRun) -> None:
    run = shared_run
    run.keep_worker()
    first = run.add(*[prompts(run, 2, f"a{number}") for number in range(5)])
    run.wait(*first)
    until(lambda: run.keys_of_batches() == [])
    num_keys = fleet.hints.redis.dbsize()

    more = run.add(*[prompts(run, 2, f"b{number}") for number in range(30)])
    run.wait(*more)

    until(lambda: run.keys_of_batches() == [])
    assert fleet.hints.redis.dbsize() < num_keys + 5  # of 30 batches
    assert list(fleet.hints.redis.scan_iter("celery-task-meta-*")) == []


def test_events_that_nobody_reads_do_not_pile_up(fleet: Fleet, shared_run: FaultRun) -> None:
    run = shared_run
    run.keep_worker()

    run.wait(*run.add(*[prompts(run, 1, f"{number}") for number in range(20)]))

    assert list(fleet.hints.redis.scan_iter("*celeryev*", _type="list")) == []


def test_a_worker_told_to_go_while_redis_is_away_goes_and_its_batch_is_not_lost(
    fleet: Fleet, run: FaultRun
) -> None:
    worker = run.worker("w1")
    (message,) = run.add([prompt(run.text("done")), prompt(run.text("tokens=250"))])
    until(lambda: len(fleet.engine().running()) == 1)

    fleet.redis.kill()
    worker.send(signal.SIGTERM)
    code = worker.wait(30)
    fleet.redis.start()
    run.worker("w2")

    until(lambda: run.is_done([message]) or run.reconcile() > 0)
    run.wait(message)
    run.prove()
    assert code in (0, 1)


def test_after_a_flush_exactly_the_batches_without_a_commit_come_back(
    fleet: Fleet, run: FaultRun
) -> None:
    run.worker(max_in_flight=4)
    (done,) = run.add(prompts(run, 4, "done"))
    run.wait(done)
    others = run.add(*[prompts(run, 4, f"tokens=100 {number}") for number in range(7)])
    inflight = fleet.hints.keys.inflight(run.name)
    until(lambda: fleet.hints.redis.zcard(inflight) == 3)  # as many as the worker takes at once
    until(lambda: len(fleet.engine().running()) == 4)

    fleet.hints.redis.flushall()
    until(lambda: fleet.hints.redis.zcard(inflight) == 3)  # the holder claims again
    num_sent = run.reconcile()

    assert num_sent == 4
    run.wait(*others, timeout_s=90)
    run.prove()
    assert run.num_made_twice() == 0


def test_a_producer_killed_half_way_and_run_again_plans_and_hints_each_prompt_once(
    fleet: Fleet, base_spec: RunSpec, tmp_path: Path
) -> None:
    run = FaultRun(fleet, dataclasses.replace(base_spec, run=f"run-{uuid.uuid4().hex[:12]}"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": "{n}", "prompt": "{n} times"}}\n' for n in range(2500)))
    settings = dataclasses.replace(fleet.settings(run.name), model=str(fleet.place.model_dir))
    argv = [sys.executable, "-m", "fleet", "enqueue", str(rows), "--batch-size", "1"]
    environ = {k: v for k, v in settings.environment().items() if v}
    producer = Process("producer", argv, tmp_path, environ)
    first_segment = RunKeys(run.name).segment(0)

    producer.start()
    until(lambda: run.store.exists(first_segment) or not producer.is_alive, 60, "a segment")
    producer.kill()
    num_planned = sum(len(s.batches) for s in read_segments(run.store, run.name))
    for _ in range(2):
        producer.start()
        assert producer.wait(120) == 0, producer.tail()
    producer.close()

    found = audit(run.store, run.name)
    assert 0 < num_planned < 2500
    assert (found.num_prompts, found.num_waiting, found.findings) == (2500, 2500, [])
    assert fleet.hints.redis.zcard(fleet.hints.keys.pending(run.name)) == 2500
    queued = [name for name in _queued_ids(fleet) if name.startswith(f"{run.name}/")]
    assert len(queued) == len(set(queued)) == 2500


def _queued_ids(fleet: Fleet) -> list[str]:
    """The batch of every message in any list of any queue."""
    return [
        json.loads(message)["headers"]["id"]
        for key in fleet.hints.redis.scan_iter("generate.*", _type="list")
        for message in fleet.hints.redis.lrange(key, 0, -1)
    ]


def test_a_worker_that_was_stopped_longer_than_its_lease_finds_the_batch_done_and_stops(
    fleet: Fleet, run: FaultRun
) -> None:
    sleeper = run.worker("w1", engine="slow")
    (message,) = run.add(prompts(run, 4, "tokens=100"))
    until(lambda: len(fleet.engine("slow").running()) == 4)

    sleeper.send(signal.SIGSTOP)
    run.worker("w2")
    run.wait(message)
    sleeper.send(signal.SIGCONT)

    until(lambda: fleet.engine("slow").running() == {})
    name = batch_name(message.segment, message.batch)
    until(lambda: not fleet.hints.redis.exists(fleet.hints.keys.lease(run.name, name)))
    assert run.commit(message).worker == "w2"
    run.prove()
