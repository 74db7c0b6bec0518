"""What `status` says of a run beside its progress: by names that scripts read."""

from __future__ import annotations

import json
import time

import pytest
import redis
import uuid_utils
from typer.testing import CliRunner

from dflash_workers.cli_bench import app
from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.status import Overview, read_status
from tests.batches import until
from tests.dflash_workers.test_progress import NAMES, asked_of, batches, commit
from tests.planned import Plan, prompt


def test_its_names_are_these_and_progress_own_among_them(
    plan: Plan, store: Store, hints: Hints
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)

    status = read_status(store, hints, plan.spec.run)

    own = (
        "queue num_queued num_pending num_inflight workers tokenizer_up "
        "eta_low_hours eta_high_hours mean_rate_per_sec "
        "rejections made_again_tokens gpu_hours cost_usd num_untokenized num_quarantined trainers "
        "errors"
    )
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


def test_what_a_run_has_cost_is_its_workers_time_at_the_prices_that_estimate_was_told(
    plan: Plan, store: Store, hints: Hints, settings: Settings
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)  # took 36 s
    before = read_status(store, hints, plan.spec.run)

    told = ["estimate", "--prompts", "9", "--gpu", "h200=3,b200=6", "--spot", "0.5", "--json"]
    estimated = CliRunner().invoke(app, [*told, "--run", plan.spec.run], env=settings.environment())
    after = read_status(store, hints, plan.spec.run)

    assert estimated.exit_code == 0, estimated.output
    assert before["gpu_hours"] == pytest.approx(0.01, rel=0.01)
    assert before["cost_usd"] == {}
    assert after["cost_usd"] == {"h200": pytest.approx(0.015), "b200": pytest.approx(0.03)}


def test_the_newest_troubles_are_told_with_their_reasons(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 1, 1)
    letter = {"message": {}, "error": "no such run", "at": time.time() + 5}
    redis_client.lpush(hints.keys.dead("plan"), json.dumps(letter))

    status = read_status(store, hints, plan.spec.run)

    assert status["rejections"] == {"why": 1}
    assert [error["what"] for error in status["errors"]] == [
        "dead letter (plan): no such run",
        "rejected '0': why: ",
    ]


def test_a_trainer_is_as_many_shards_behind_as_its_order_does_not_name_until_it_has_ended(
    plan: Plan, store: Store, hints: Hints
) -> None:
    messages = plan.add(*batches(*[1] * 9))
    keys = RunKeys(plan.spec.run)
    for message in messages:
        commit(store, message, 1)
        store.put_new(keys.shard(0, message.batch), b"arrow")
    for number in range(6):
        entry = {"num_shards": number + 1}
        store.put_new(f"{keys.train('eager')}order/{number:06d}.json", json.dumps(entry).encode())
    store.put_new(f"{keys.train('late')}order/000000.json", b'{"num_shards": 2}')
    for name, step in (("late", 5), ("over", 7)):
        steps = [{"step": number + 1, "num_steps": 7, "loss": 1.0} for number in range(step)]
        body = b"".join(json.dumps(line).encode() + b"\n" for line in steps)
        store.replace(f"{keys.train(name)}metrics.jsonl", body)
    store.put_new(f"{keys.train('over')}order/000000.json", b'{"num_shards": 4}')
    store.put_new(f"{keys.train('other')}checkpoints/1/state.json", b"{}")

    status = read_status(store, hints, plan.spec.run)

    assert status["num_untokenized"] == 0
    names = ("name", "num_shards", "num_behind", "step", "num_steps", "is_finished")
    assert [tuple(lag[name] for name in names) for lag in status["trainers"]] == [
        ("eager", 6, 3, 0, 0, False),
        ("late", 2, 7, 5, 7, False),
        ("over", 4, 0, 7, 7, True),
    ]


def test_a_dead_worker_is_shown_no_longer_than_its_heartbeat_lasts(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    plan.add(*batches(2))
    keys = [hints.keys.worker(f"w{number}") for number in range(10)]
    for key in keys:
        redis_client.hset(key, mapping={"state": "up", "process": "p", "in_flight": "3"})
        redis_client.pexpire(key, 60_000)
    overview = Overview(store, hints, plan.spec.run)
    seen = [len(overview.read()["workers"])]

    for key in keys:
        redis_client.pexpire(key, 1)
    until(lambda: not redis_client.exists(*keys))

    assert [*seen, len(overview.read()["workers"])] == [10, 0]


def test_who_had_to_count_many_commits_keeps_the_count_for_the_next(
    plan: Plan, store: Store, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_workers.status._MANY_COMMITS", 3)
    messages = plan.add(*batches(*[1] * 5))
    for message in messages[:2]:
        commit(store, message, 1)
    few = read_status(store, hints, plan.spec.run)
    kept_few = store.exists(RunKeys(plan.spec.run).counted)
    for message in messages[2:]:
        commit(store, message, 1)

    many = read_status(store, hints, plan.spec.run)
    asked = asked_of(store)
    again = read_status(store, hints, plan.spec.run)

    assert (few["completed"], kept_few) == (2, False)
    assert many["completed"] == again["completed"] == 5
    assert not [name for name in asked if name.startswith("commits/0")]


def test_a_look_asks_s3_as_often_of_a_large_run_as_of_a_small_one(
    plan: Plan, store: Store, hints: Hints
) -> None:
    run = plan.spec.run
    plan.add([prompt("open")])
    overview = Overview(store, hints, run)
    asked, num_asked = asked_of(store), []

    for _ in range(3):
        for number in range(3):
            for message in plan.add(*batches(1, 1), [prompt(f"{plan.num_segments} {number}")]):
                commit(store, message, 1)
                store.put_new(RunKeys(run).shard(message.segment, message.batch), b"arrow")
        plan.add([prompt(f"open {plan.num_segments}")])
        overview.read()
        asked.clear()
        status = overview.read()
        num_asked.append(len(asked))

    assert (status["completed"], status["total"]) == (27, 31)
    assert num_asked == [num_asked[0]] * 3
