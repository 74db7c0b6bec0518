"""An engine dies under a batch: who runs again, with whom, and who never."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from dflash_workers.claims import Claim
from dflash_workers.contract.commit import read_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, Prompt
from dflash_workers.contract.store import Store
from dflash_workers.poison import Case
from dflash_workers.worker import Worker
from tests.batches import MakeWorker, commit_of, is_committed, left_in_redis, until, work
from tests.dflash_workers.conftest import IMPATIENT, OPTIONS
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

PATIENT = dataclasses.replace(
    OPTIONS, patience=dataclasses.replace(IMPATIENT, request_s=60, away_s=20)
)


def earlier_holder(worker: Worker, message: BatchMessage) -> Case:
    """What another worker may have noted of the batch."""
    return worker.site.suspects.open(Claim(message, "earlier"))


def blame(case: Case, *prompts: Prompt, times: int, alone: bool = False) -> None:
    for _ in range(times):
        case.blame([p.key for p in prompts], "exit status -9", "CUDA error", alone=alone)


@contextmanager
def reviving(engine: FakeEngine, poison: str) -> Iterator[list[list[str]]]:
    """The engine dies shortly after it is asked `poison`, and comes back; what it was asked in each
    of its lives."""
    lives: list[list[str]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            asked, seen = list(engine.asked), sum(map(len, lives))
            if poison in asked[seen:]:
                time.sleep(0.2)
                lives.append(list(engine.asked)[seen:])
                engine.die()
                time.sleep(1.5)
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
    worker = make_worker(options=dataclasses.replace(PATIENT, patience=IMPATIENT))
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
def test_the_prompt_that_kills_is_found_and_rejected_and_no_other(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine
) -> None:
    poison = prompt("wait=60 poison")
    message, bystander = plan.add(
        [prompt("wait=0.5 a"), poison, prompt("wait=0.5 b")],
        [prompt(f"wait=0.5 c{i}") for i in range(3)],
    )
    worker = make_worker(options=PATIENT)

    with reviving(engine, poison.id) as lives:
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
