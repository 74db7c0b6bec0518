"""An engine dies under a batch: who runs again, with whom, and who never."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from dflash_workers.claims import Claim, Timing
from dflash_workers.contract.commit import read_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, Prompt
from dflash_workers.contract.store import Store
from dflash_workers.generate import generate, open_batch
from dflash_workers.poison import Case
from dflash_workers.worker import Worker
from tests.batches import MakeWorker, commit_of, is_committed, left_in_redis, until, work
from tests.dflash_workers.conftest import IMPATIENT, OPTIONS
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

PATIENT = dataclasses.replace(
    OPTIONS, patience=dataclasses.replace(IMPATIENT, request_s=60, away_s=20)
)

# A fleet's own lease and hand-over: with a short one, a busy machine hands a batch over twice.
GIVING_BACK = dataclasses.replace(PATIENT, timing=Timing())


def earlier_holder(worker: Worker, message: BatchMessage) -> Case:
    """What another worker may have noted of the batch."""
    return worker.site.suspects.open(Claim(message, "earlier"))


def blame(case: Case, *prompts: Prompt, times: int, alone: bool = False) -> None:
    for _ in range(times):
        case.blame([p.key for p in prompts], "exit status -9", "CUDA error", alone=alone)


@contextmanager
def reviving(engine: FakeEngine, poison: str, away_s: float) -> Iterator[list[list[str]]]:
    """The engine dies shortly after it is asked `poison`, and comes back `away_s` later; what it
    was asked in each of its lives."""
    lives: list[list[str]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            asked, seen = list(engine.asked), sum(map(len, lives))
            if poison in asked[seen:]:
                time.sleep(0.2)
                lives.append(list(engine.asked)[seen:])
                engine.die()
                time.sleep(away_s)
                engine.revive()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lives
    finally:
        over.set()
        thread.join()


def test_what_ran_in_an_engine_that_died_runs_again_and_what_had_ended_does_not(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> None:
    prompts = [prompt("say:done"), prompt("wait=0.8 a"), prompt("wait=0.8 b")]
    (message,) = plan.add(prompts)
    worker = make_worker(options=PATIENT)
    journal = worker.site.journals.open(Claim(message, "reader"))
    thread = work(worker, message)
    until(lambda: engine.running == 2)
    until(lambda: _num_ended(worker, message) == 1)

    engine.die()
    until(lambda: worker.site.engine.num_deaths == 1)
    engine.revive()
    thread.join(30)

    journal.load()
    commit = commit_of(store, message)
    assert engine.asked.count("say:done") == 1
    assert engine.asked.count("wait=0.8 a") == engine.asked.count("wait=0.8 b") == 2
    assert commit.num_rows == 3
    assert commit.notes["engine_deaths"] == 1


def _num_ended(worker: Worker, message: BatchMessage) -> int:
    journal = worker.site.journals.open(Claim(message, "reader"))
    journal.load()
    return len(journal._notes)


def test_a_batch_whose_engine_stays_dead_is_given_back_and_says_who_was_in_it(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine, store: Store, hints: Hints
) -> None:
    inside, outside = [prompt(f"wait=60 {i}") for i in range(4)], [prompt("say:waits")]
    (message,) = plan.add(inside + outside)
    worker = make_worker(options=dataclasses.replace(GIVING_BACK, patience=IMPATIENT))
    thread = work(worker, message)
    until(lambda: engine.running == 4)

    engine.die()
    thread.join(20)

    assert not thread.is_alive()
    assert hints.num_queued(plan.queue) == 1
    assert not is_committed(store, message)
    case = earlier_holder(worker, message)
    case.load()
    (death,) = case.history.deaths
    assert sorted(death.prompt_keys) == sorted(p.key for p in inside)
    assert not death.alone
    assert "the engine died" in death.evidence


def test_a_suspect_runs_last_and_with_nothing_else_in_the_engine(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> None:
    suspect = prompt("wait=0.4 suspect")
    first, second = plan.add(
        [suspect, *(prompt(f"wait=0.2 a{i}") for i in range(6))],
        [prompt(f"wait=0.2 b{i}") for i in range(12)],
    )
    worker = make_worker(options=PATIENT)
    blame(earlier_holder(worker, first), suspect, times=2)
    threads = [work(worker, message) for message in (first, second)]

    until(lambda: suspect.id in engine.asked)
    seen = []
    while is_alone := suspect.id == engine.asked[-1]:
        seen.append(engine.running)
        time.sleep(0.02)
        if is_alone and is_committed(store, first):
            break
    for thread in threads:
        thread.join()

    mine = [asked for asked in engine.asked if " a" in asked or asked == suspect.id]
    assert mine[-1] == suspect.id
    assert len(seen) > 5
    assert set(seen) <= {0, 1}
    assert commit_of(store, first).num_rows == 7
    assert commit_of(store, second).num_rows == 12


def test_a_batch_of_condemned_prompts_commits_without_rows_and_never_asks(
    plan: Plan,
    make_worker: MakeWorker,
    store: Store,
    engine: FakeEngine,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    prompts = [prompt("say:never"), prompt("say:nor this")]
    (message,) = plan.add(prompts)
    worker = make_worker()
    case = earlier_holder(worker, message)
    for poison in prompts:
        blame(case, poison, times=2, alone=True)

    work(worker, message).join()

    commit = commit_of(store, message)
    assert (commit.num_rows, read_rows(store, commit)) == (0, [])
    assert [(r.key, r.reason) for r in commit.rejected] == [(p.key, "poison") for p in prompts]
    assert commit.rejected[0].detail == "exit status -9 | CUDA error"
    assert engine.asked == []
    assert left_in_redis(redis_client, hints) == []


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [1.5, 0.0])
def test_the_prompt_that_kills_is_found_and_rejected_and_no_other(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine, away_s: float
) -> None:
    poison = prompt("wait=60 poison")
    message, bystander = plan.add(
        [prompt("wait=0.5 a"), poison, prompt("wait=0.5 b")],
        [prompt(f"wait=0.5 c{i}") for i in range(3)],
    )
    worker = make_worker(options=PATIENT)

    with reviving(engine, poison.id, away_s) as lives:
        threads = [work(worker, m) for m in (message, bystander)]
        for thread in threads:
            thread.join(90)

    commit = commit_of(store, message)
    assert [r.key for r in commit.rejected] == [poison.key]
    assert commit.rejected[0].reason == "poison"
    assert commit.num_rows == 2
    assert commit_of(store, bystander).rejected == []
    assert len(lives) == 4
    assert lives[2][-1:] == lives[3][-1:] == [poison.id]


@pytest.mark.parametrize("away_s", [0.0, 1.5])
def test_a_network_that_is_cut_leaves_nobody_suspect(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine, away_s: float
) -> None:
    (message,) = plan.add([prompt(f"wait=0.5 {name}") for name in "abc"])
    worker = make_worker(options=PATIENT)
    thread = work(worker, message)
    until(lambda: engine.running == 3)

    engine.hide()
    time.sleep(away_s)
    case = earlier_holder(worker, message)
    case.load()
    num_blamed = len(case.history.deaths)
    engine.revive()
    until(lambda: engine.running == 3)
    case.load()
    num_blamed_in_the_end = len(case.history.deaths)
    thread.join(30)

    commit = commit_of(store, message)
    assert (num_blamed, num_blamed_in_the_end) == (int(away_s > 0), 0)
    assert (commit.num_rows, commit.rejected) == (3, [])
    assert "engine_deaths" not in commit.notes


def test_a_batch_that_needs_no_engine_commits_while_there_is_none(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> None:
    noted, poison, long = [prompt("say:a", "say:b")], prompt("say:never"), prompt("x " * 4096)
    source, message = plan.add(noted, [*noted, poison, long])
    worker = make_worker()
    work(worker, source).join()
    journal = worker.site.journals.open(Claim(message, "earlier"))
    (row,) = read_rows(store, commit_of(store, source))
    for answer in row.answers:
        asyncio.run(journal.keep(row.key, answer))
    blame(earlier_holder(worker, message), poison, times=2, alone=True)
    num_asked = len(engine.asked)

    engine.die()
    until(lambda: worker.site.gate.why_closed() is not None)
    claim = worker.site.claims.claim(message)
    assert claim
    generate(open_batch(message, worker.site), claim, worker.site)

    commit = commit_of(store, message)
    assert [row.key for row in read_rows(store, commit)] == [noted[0].key]
    assert [r.reason for r in commit.rejected] == ["poison", "context_length"]
    assert commit.engine["version"] == "0.5.17-fake"
    assert len(engine.asked) == num_asked


def test_a_batch_that_stands_still_is_given_back(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine, hints: Hints
) -> None:
    (message,) = plan.add([prompt("say:never comes to it")])
    patience = dataclasses.replace(IMPATIENT, lost_s=0.5, away_s=0.2, max_retry_after_s=0.3)
    worker = make_worker(options=dataclasses.replace(GIVING_BACK, patience=patience))
    with every_seat_taken(worker):
        started = time.monotonic()
        thread = work(worker, message)
        until(lambda: hints.num_queued(plan.queue) == 1, 10)

    assert time.monotonic() - started >= 1.5  # the longest silence that its requests are allowed
    assert not is_committed(store, message)
    assert engine.asked == []
    thread.join()


def test_what_a_dead_worker_left_does_not_wait_behind_what_waits_for_the_engine(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    left, *others = plan.add(
        [prompt("say:left")], *([prompt(f"say:{b} {n}") for n in range(8)] for b in range(2))
    )
    worker = make_worker(options=PATIENT)
    earlier_holder(worker, left).note_running()  # and then not a word
    slots = worker.site.engine.slots
    with every_seat_taken(worker):
        threads = [work(worker, message) for message in others]
        until(lambda: len(slots._ordinary) == 16)
        threads.append(work(worker, left))
        until(lambda: len(slots._first) == 1)

    for thread in threads:
        thread.join()
    assert engine.asked.index("say:left") < 4  # among the first that found a seat


@contextmanager
def every_seat_taken(worker: Worker) -> Iterator[None]:
    async def take(is_over: asyncio.Event) -> None:
        async with worker.site.engine.slots.every():
            await is_over.wait()

    loop, is_over = worker.site.loop, asyncio.Event()
    taking = asyncio.run_coroutine_threadsafe(take(is_over), loop)
    until(lambda: worker.site.engine.slots.num_free == 0)
    yield
    loop.call_soon_threadsafe(is_over.set)
    taking.result(10)
