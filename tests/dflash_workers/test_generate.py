"""One batch from hint to commit, whatever happens to its engine, its lease or its rivals."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import cast

import pytest
import redis

from dflash_workers.claims import Claim, Timing
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.commit import (
    publish,
    read_rows,
    seal_rows,
)
from dflash_workers.contract.errors import StoreUnavailable
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.records import Answer, BatchMessage, Commit, Prompt, Row, Turn
from dflash_workers.contract.store import Store
from dflash_workers.holds import News
from dflash_workers.journal import Journal
from tests.batches import (
    MakeWorker,
    commit_of,
    cut_off,
    is_committed,
    is_committed_once,
    left_in_redis,
    until,
    work,
)
from tests.dflash_workers.conftest import IMPATIENT, OPTIONS
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt


def test_a_batch_is_answered_committed_and_forgotten(
    plan: Plan, make_worker: MakeWorker, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    prompts = [prompt(f"say:{i}", f"say:{i}{i}") for i in range(6)]
    (message,) = plan.add(prompts)
    hints.offer([message], plan.queue)

    work(make_worker(), message).join()

    commit = commit_of(store, message)
    rows = read_rows(store, commit)
    assert [row.key for row in rows] == [p.key for p in prompts]
    assert [[a.content for a in row.answers] for row in rows] == [
        [f"{i}", f"{i}{i}"] for i in range(6)
    ]
    answers = [a for row in rows for a in row.answers]
    assert commit.output_tokens == sum(len(a.output_ids) for a in answers)
    assert commit.input_tokens == sum(len(a.input_ids) for a in answers)
    assert commit.engine["version"] == "0.5.17-fake"
    assert commit.notes == {}
    assert left_in_redis(redis_client, hints) == []


def test_no_more_requests_run_than_the_limit_over_all_batches(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    messages = plan.add(*[[prompt(f"wait=0.05 {b} {i}") for i in range(6)] for b in range(3)])
    worker = make_worker()

    for thread in [work(worker, message) for message in messages]:
        thread.join()

    assert engine.max_running == 4


def test_a_rejected_prompt_is_said_in_the_commit_and_the_rest_is_kept(
    plan: Plan, make_worker: MakeWorker, store: Store
) -> None:
    (message,) = plan.add([prompt("say:fine"), prompt("refuse"), prompt("x " * 4096)])

    work(make_worker(), message).join()

    commit = commit_of(store, message)
    assert commit.num_rows == 1
    assert [r.reason for r in commit.rejected] == ["engine_refused", "context_length"]


def test_a_batch_of_rejected_prompts_commits_without_rows(
    plan: Plan, make_worker: MakeWorker, store: Store
) -> None:
    (message,) = plan.add([prompt("refuse"), prompt("refuse too")])

    work(make_worker(), message).join()

    commit = commit_of(store, message)
    assert (commit.num_rows, len(commit.rejected)) == (0, 2)
    assert read_rows(store, commit) == []


def test_who_leaves_notes_what_was_sampled_and_the_next_goes_on_from_there(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    hints: Hints,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    (message,) = plan.add([prompt(f"step=0.05 say:{text}"), prompt("say:short")])
    noting = dataclasses.replace(OPTIONS, note_every=2)
    leaver, heir = make_worker("w1", noting), make_worker("w2", noting)
    thread = work(leaver, message)
    until(lambda: engine.running == 1 and leaver.site.engine.num_tokens > 20)

    started = time.monotonic()
    leaver.site.holds.drain()
    until(lambda: hints.num_queued(plan.queue) == 1)
    took_s = time.monotonic() - started
    thread.join()
    given_back = hints.redis.zcard(hints.keys.inflight(message.run)) == 0
    work(heir, message).join()

    commit = commit_of(store, message)
    whole, short = (row.answers[0] for row in read_rows(store, commit))
    assert took_s < 2
    assert given_back
    assert (whole.content, short.content) == (text, "short")
    assert len(whole.segments) == 2
    assert engine.asked.count("say:short") == 1
    assert commit.notes["continued_tokens"] == whole.segments[0] > 5


def test_the_workers_limit_of_tool_rounds_holds(
    plan: Plan, make_worker: MakeWorker, store: Store
) -> None:
    call = 'say:<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    turn = Turn([{"role": "user", "content": call}], [{"name": "weather", "content": call}] * 9)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    (message,) = plan.add([prompt("tools", turns=[turn], tools=[tool])])

    work(make_worker(options=dataclasses.replace(OPTIONS, max_tool_rounds=1)), message).join()

    (row,) = read_rows(store, commit_of(store, message))
    assert len(row.answers) == 2
    assert "tool_rounds" in row.flags


def test_within_the_grace_what_runs_may_end_and_nothing_new_is_started(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine, hints: Hints, store: Store
) -> None:
    first, second = plan.add([prompt(f"wait=3 {i}") for i in range(4)], [prompt("say:never here")])
    patience = dataclasses.replace(IMPATIENT, request_s=60)
    worker = make_worker(options=dataclasses.replace(OPTIONS, patience=patience))
    running = work(worker, first)
    until(lambda: engine.running == 4)
    waiting = work(worker, second)
    until(lambda: len(worker.site.holds) == 2)

    worker.site.holds.tell(News.CLOSING)
    waiting.join(2)
    was_given_back = not waiting.is_alive() and hints.num_queued(plan.queue) == 1
    running.join()

    assert was_given_back
    assert commit_of(store, first).num_rows == 4
    assert not is_committed(store, second)
    assert engine.aborted == []
    assert "say:never here" not in engine.asked


def test_retaking_after_a_stall_reads_the_journal_again(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    hints: Hints,
    redis_client: redis.Redis,
    store: Store,
    chat: Chat,
) -> None:
    (message,) = plan.add([*(prompt(f"wait=0.6 {i}") for i in range(4)), prompt("say:late")])
    worker = make_worker()
    thread = work(worker, message)
    until(lambda: engine.running == 4)

    late = Claim(message, "another")
    ids = chat.prompt_ids([{"role": "user", "content": "say:late"}], [])
    noted = chat.tokenizer.encode("noted by another")
    answer = Answer(0, ids, noted, [len(noted)], "", "", [], "stop", 0, 0.1, 1)
    asyncio.run(worker.site.journals.open(late).keep(prompt("say:late").key, answer))
    redis_client.delete(hints.keys.lease(message.run, late.name))
    thread.join()

    rows = read_rows(store, commit_of(store, message))
    assert [a.content for a in rows[4].answers] == ["noted by another"]
    assert "say:late" not in engine.asked


def test_a_commit_between_claim_and_journal_read_is_seen(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (message,) = plan.add([prompt("say:once")])
    first, second = make_worker("w1"), make_worker("w2")
    load = Journal.load

    def load_after_anothers_commit(self: Journal) -> None:
        monkeypatch.setattr(Journal, "load", load)
        while not is_committed(store, message):  # the second one's renewals may be quicker
            redis_client.delete(hints.keys.lease(message.run, batch_name(0, message.batch)))
            work(first, message).join()
        load(self)

    monkeypatch.setattr(Journal, "load", load_after_anothers_commit)
    work(second, message).join()

    assert engine.asked == ["say:once"]
    assert commit_of(store, message).worker == "w1"
    assert left_in_redis(redis_client, hints) == []


def test_a_holder_whose_batch_another_committed_stops_asking(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    (message,) = plan.add([prompt("wait=30")])
    thread = work(make_worker(), message)
    until(lambda: engine.running == 1)

    commit, body = _rivals_commit(message, [])
    publish(store, commit, body)
    redis_client.delete(hints.keys.lease(message.run, batch_name(0, message.batch)))

    thread.join(5)
    assert not thread.is_alive()
    assert len(engine.aborted) == 1
    assert commit_of(store, message) == commit
    assert left_in_redis(redis_client, hints) == []


def test_a_holder_that_lost_its_batch_in_a_flush_notes_again_what_had_ended(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    (message,) = plan.add([prompt("say:ended"), prompt("wait=30")])
    thread = work(make_worker(), message)
    name = batch_name(0, message.batch)
    lease, journal = hints.keys.lease(message.run, name), hints.keys.journal(message.run, name)
    until(lambda: engine.running == 1 and redis_client.hlen(journal) == 1)

    with redis_client.pipeline() as flush:  # and another claims before the holder renews
        flush.delete(journal)
        flush.set(lease, "another's", px=60_000)
        flush.execute()

    thread.join(10)
    assert not thread.is_alive()
    assert len(engine.aborted) == 1
    noted = cast("list[bytes]", redis_client.hkeys(journal))
    assert any(field.endswith(b":0") for field in noted)


def test_a_holder_that_lost_a_batch_which_has_its_commit_leaves_no_notes(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    (message,) = plan.add([prompt("say:ended"), prompt("wait=30")])
    thread = work(make_worker(), message)
    name = batch_name(0, message.batch)
    lease, journal = hints.keys.lease(message.run, name), hints.keys.journal(message.run, name)
    until(lambda: engine.running == 1 and redis_client.hlen(journal) == 1)

    publish(store, *_rivals_commit(message, []))
    with redis_client.pipeline() as clear:  # by who committed, while a third holds it
        clear.delete(journal)
        clear.set(lease, "another's", px=60_000)
        clear.execute()

    thread.join(10)
    assert not thread.is_alive()
    assert not redis_client.exists(journal)


def _rivals_commit(message: BatchMessage, rows: list[Row]) -> tuple[Commit, bytes]:
    body, sha256 = seal_rows(rows)
    key = RunKeys(message.run).data(message.segment, message.batch, "rival")
    return (
        Commit(
            1,
            message.run,
            message.segment,
            message.batch,
            "rival",
            key,
            sha256,
            len(body),
            len(rows),
            [],
            0,
            0,
            1.0,
            2.0,
            "rival",
            {},
        ),
        body,
    )


def test_a_holder_that_lost_its_lease_stops_and_aborts_its_requests(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    (message,) = plan.add([prompt("wait=30 a"), prompt("wait=30 b")])
    thread = work(make_worker(), message)
    until(lambda: engine.running == 2)

    lease = hints.keys.lease(message.run, batch_name(0, message.batch))
    redis_client.set(lease, "another", px=60_000)

    thread.join(5)
    assert not thread.is_alive()
    assert sorted(engine.aborted) == sorted(r["rid"] for r in engine.requests)
    assert redis_client.get(lease) == b"another"
    assert not is_committed(store, message)


def test_two_workers_that_race_make_one_commit_and_the_loser_takes_its_data_away(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    redis_client: redis.Redis,
) -> None:
    (message,) = plan.add([prompt(f"wait=1.5 {i}") for i in range(3)])
    patience = dataclasses.replace(IMPATIENT, request_s=60)
    never_renewed = dataclasses.replace(OPTIONS, timing=Timing(), patience=patience)
    first, second = make_worker("w1", never_renewed), make_worker("w2", never_renewed)
    threads = [work(first, message)]
    until(lambda: engine.running == 3)

    for key in redis_client.scan_iter(f"{hints.keys.prefix}*"):
        redis_client.delete(key)  # neither knows of the other any more
    threads.append(work(second, message))
    for thread in threads:
        thread.join()

    commit = commit_of(store, message)
    assert len(engine.asked) == 6
    assert [key for key, _ in store.list(f"{message.run}/data/")] == [commit.data_key]
    assert len(read_rows(store, commit)) == 3
    assert is_committed_once(store, message)


def test_a_late_commit_never_names_a_deleted_object(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    hints: Hints,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (message,) = plan.add([prompt("say:mine")])
    worker = make_worker()
    delayed: list[tuple[str, bytes]] = []
    put_new = Store.put_new

    def commit_stays_in_the_network(self: Store, key: str, body: bytes) -> None:
        if "/commits/" in key:
            delayed.append((key, body))
            raise StoreUnavailable("timed out")
        put_new(self, key, body)

    monkeypatch.setattr(Store, "put_new", commit_stays_in_the_network)
    thread = work(worker, message)
    until(lambda: bool(delayed))
    lease = hints.keys.lease(message.run, batch_name(0, message.batch))
    redis_client.set(lease, "another", px=60_000)
    thread.join()
    monkeypatch.setattr(Store, "put_new", put_new)

    store.put_new(*delayed[0])

    assert len(read_rows(store, commit_of(store, message))) == 1


def test_with_redis_away_the_batch_still_commits(
    plan: Plan,
    make_worker: MakeWorker,
    engine: FakeEngine,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts: list[Prompt] = [prompt(f"wait=0.4 {i}") for i in range(5)]
    (message,) = plan.add(prompts)
    worker = make_worker()
    thread = work(worker, message)
    until(lambda: engine.running == 4)

    for client in (worker.site.hints.redis, worker.site.journals.redis):
        cut_off(client)

    thread.join(30)
    assert commit_of(store, message).num_rows == 5
    assert len(engine.asked) == 5
