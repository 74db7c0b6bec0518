"""What `status` says of a run beside its progress: by names that scripts read."""

from __future__ import annotations

import pytest
import redis
import uuid_utils

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.store import Store
from dflash_workers.status import read_status
from tests.dflash_workers.test_progress import NAMES, batches, commit
from tests.planned import Plan, prompt


def test_its_names_are_these_and_progress_own_among_them(
    plan: Plan, store: Store, hints: Hints
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)

    status = read_status(store, hints, plan.spec.run)

    own = "queue num_queued num_pending num_inflight workers"
    assert list(status) == ["run", "state", "sealed", *NAMES.split(), "num_noted", *own.split()]


@pytest.mark.parametrize(
    ("orders", "state"),
    [
        ([], "active"),
        ([Action.PAUSE], "paused"),
        ([Action.PAUSE, Action.RESUME], "active"),
        ([Action.CANCEL], "cancelled"),
    ],
)
def test_a_run_that_does_not_go_on_says_so_and_promises_no_end(
    plan: Plan, store: Store, hints: Hints, orders: list[Action], state: str
) -> None:
    first, _second = plan.add(*batches(2, 2))
    commit(store, first, 2)
    for action in orders:
        Control(store, plan.spec.run).order(action)

    status = read_status(store, hints, plan.spec.run)

    assert status["state"] == state
    assert status["status"] == ("running" if state == "active" else state)
    assert (status["eta_hours"] is None) == (state != "active")


def test_whether_the_plan_is_closed_is_said(plan: Plan, store: Store, hints: Hints) -> None:
    plan.add(*batches(2))
    before = read_status(store, hints, plan.spec.run)["sealed"]

    plan.add([prompt("last")], sealed=True)

    assert (before, read_status(store, hints, plan.spec.run)["sealed"]) == (False, True)


def test_what_is_noted_of_a_batch_that_runs_needs_no_time_any_more(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    first, second = plan.add(*batches(4, 4))
    commit(store, first, 4)
    run, name = plan.spec.run, f"{second.segment}/{second.batch}"
    before = read_status(store, hints, run)

    redis_client.zadd(hints.keys.inflight(run), {name: 1})
    redis_client.set(hints.keys.lease(run, name), str(uuid_utils.uuid7()))
    redis_client.hset(hints.keys.journal(run, name), "k1:0", "row")
    redis_client.hset(hints.keys.journal(run, name), "k2:0", "row")
    after = read_status(store, hints, run)

    assert (before["num_noted"], after["num_noted"]) == (0, 2)
    assert before["completed"] == after["completed"] == 4
    assert after["rate_per_sec"] > before["rate_per_sec"] > 0
    assert after["eta_hours"] < before["eta_hours"] * 0.6
