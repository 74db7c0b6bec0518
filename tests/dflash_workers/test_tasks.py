"""What becomes of a hint: worked on, left to its holder, given back, or kept for people."""

from __future__ import annotations

import dataclasses

import pytest
import redis

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.store import Store
from dflash_workers.tasks import take
from tests.batches import MakeWorker, commit_of, is_committed, until, work
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt


def test_an_engine_that_stays_away_costs_nothing_that_ended(
    plan: Plan, make_worker: MakeWorker, store: Store, engine: FakeEngine, hints: Hints
) -> None:
    (message,) = plan.add([prompt("say:kept"), prompt("fail=1000")])
    worker = make_worker()

    work(worker, message).join()
    assert not is_committed(store, message)
    assert hints.num_queued(plan.queue) == 1
    engine._failures["fail=1000"] = 1000
    work(worker, message).join()

    assert commit_of(store, message).num_rows == 2
    assert engine.asked.count("say:kept") == 1


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


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"run": "R", "segment": 0, "batch": "b", "schema": 99}, "schema"),
        ({"run": "R", "segment": 0, "batch": "b", "colour": "red"}, "schema"),
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


def test_a_run_of_another_target_is_refused(
    plan: Plan, make_worker: MakeWorker, hints: Hints, redis_client: redis.Redis, store: Store
) -> None:
    plan.add([prompt("say:x")])
    other = dataclasses.replace(plan.spec.target, weights_sha256="other")
    spec = dataclasses.replace(plan.spec, run="other-run", target=other)
    store.put_new(RunKeys("other-run").spec, dump(spec))
    worker = make_worker()

    take({"run": "other-run", "segment": 0, "batch": "b"}, worker.site)

    assert redis_client.llen(hints.keys.dead("plan")) == 1
