from __future__ import annotations

import json
import threading
import time
from collections import Counter

import redis

import celeryconfig
from dflash_workers.contract.records import Json
from producer.api import Run
from producer.enqueue import name_of, queue_of, read_claims, send_planned
from producer.ledger import Ledger
from tests.producer.conftest import CommitBatch


def rows(num_rows: int) -> list[Json]:
    return [{"id": f"p{n}", "user_turns": [f"question {n}"]} for n in range(num_rows)]


def queued(run: Run, client: redis.Redis) -> list[Json]:
    """The messages that wait with the priority of ordinary batches."""
    queue = f"{queue_of(run.spec)}\x06\x16{celeryconfig.PRIORITY_ORDINARY}"
    return [json.loads(message) for message in client.lrange(queue, 0, -1)]


def empty_queue(run: Run, client: redis.Redis) -> None:
    client.delete(f"{queue_of(run.spec)}\x06\x16{celeryconfig.PRIORITY_ORDINARY}")


def test_every_planned_batch_gets_one_hint_and_is_pending(
    run: Run, redis_client: redis.Redis
) -> None:
    empty_queue(run, redis_client)

    report = run.enqueue(rows(10), batch_size=4)

    assert (report.num_batches, report.num_sent) == (3, 3)
    messages = queued(run, redis_client)
    assert {m["headers"]["task"] for m in messages} == {celeryconfig.GENERATE_TASK}
    ledger = Ledger(run.store, run.spec.run)
    ledger.refresh()
    names = {name_of(message) for message in ledger.uncommitted()}
    assert len(names) == 3
    assert read_claims(run.hints, run.spec.run).pending == names


def test_the_same_call_again_sends_nothing_while_its_hints_wait(
    run: Run, redis_client: redis.Redis
) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(10), batch_size=4)

    again = run.enqueue(rows(10), batch_size=4)

    assert (again.num_planned, again.num_sent) == (0, 0)


def test_a_batch_that_was_planned_but_never_sent_is_sent_by_the_next_call(
    run: Run, redis_client: redis.Redis
) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(10), batch_size=4)
    redis_client.delete(run.hints.keys.pending(run.spec.run))

    assert run.enqueue(rows(10), batch_size=4).num_sent == 3


def test_what_is_done_or_in_flight_is_not_sent(
    run: Run, redis_client: redis.Redis, commit_batch: CommitBatch
) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(12), batch_size=4)
    ledger = Ledger(run.store, run.spec.run)
    ledger.refresh()
    done, busy, left = ledger.uncommitted()
    commit_batch(done)
    empty_queue(run, redis_client)
    redis_client.delete(run.hints.keys.pending(run.spec.run))
    redis_client.zadd(run.hints.keys.inflight(run.spec.run), {name_of(busy): 1})

    num_sent = run.enqueue(rows(12), batch_size=4).num_sent

    assert num_sent == 1
    assert read_claims(run.hints, run.spec.run).pending == {name_of(left)}


def test_a_full_queue_is_waited_for(run: Run, redis_client: redis.Redis) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(4), batch_size=4)
    sent = Counter[str]()

    def send() -> None:
        ledger = Ledger(run.store, run.spec.run)
        sent["hints"] = send_planned(ledger, run.hints, queue_of(run.spec), max_queued=1)

    redis_client.delete(run.hints.keys.pending(run.spec.run))
    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(1)
    assert sender.is_alive()
    empty_queue(run, redis_client)
    sender.join(timeout=20)

    assert sent["hints"] == 1
