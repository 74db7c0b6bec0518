"""progress.json: its names, its truth, its one writer."""

from __future__ import annotations

import time

import orjson
import redis

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import SCHEMA_VERSION, BatchMessage, Commit, Rejection
from dflash_workers.contract.store import Store
from dflash_workers.progress import Meter, ProgressWriter, measure
from tests.planned import Plan, prompt

NAMES = (
    "total completed failed rate_per_sec eta_hours total_input_tokens total_output_tokens "
    "avg_output_tokens elapsed_hours s3_uploaded s3_bytes status"
)


def commit(store: Store, message: BatchMessage, num_rows: int, num_rejected: int = 0) -> None:
    body, sha256 = seal_rows([])
    now = time.time()
    made = Commit(
        schema=SCHEMA_VERSION,
        run=message.run,
        segment=message.segment,
        batch=message.batch,
        attempt="a",
        data_key=RunKeys(message.run).data(message.segment, message.batch, "a"),
        sha256=sha256,
        data_bytes=100,
        num_rows=num_rows,
        rejected=[Rejection(f"{i}", f"{i}", "why", "") for i in range(num_rejected)],
        input_tokens=10 * num_rows,
        output_tokens=50 * num_rows,
        started_at=now - 36,
        finished_at=now,
        worker="w",
        engine={},
    )
    publish(store, made, body)


def batches(*sizes: int) -> list[list]:  # type: ignore[type-arg]
    return [[prompt(f"{b} {i} of {len(sizes)}") for i in range(n)] for b, n in enumerate(sizes)]


def test_every_figure_comes_from_plan_and_commits(plan: Plan, store: Store) -> None:
    first, second, _third = plan.add(*batches(4, 4, 4))
    commit(store, first, 4)
    commit(store, second, 3, 1)

    progress = measure(store, plan.spec.run)

    assert (progress.total, progress.completed, progress.failed) == (12, 7, 1)
    assert (progress.total_input_tokens, progress.total_output_tokens) == (70, 350)
    assert progress.avg_output_tokens == 50
    assert (progress.s3_uploaded, progress.s3_bytes) == (2, 200)
    assert 0.2 < progress.rate_per_sec < 0.23  # 8 prompts in 36 s
    assert progress.eta_hours is not None and 0.004 < progress.eta_hours < 0.006
    assert 0.0099 < progress.elapsed_hours < 0.011
    assert progress.status == "running"


def test_a_run_is_done_only_when_it_is_sealed_and_everything_has_a_commit(
    plan: Plan, store: Store
) -> None:
    run, statuses = plan.spec.run, [measure(store, plan.spec.run).status]
    meter = Meter(store, run)

    (first,) = plan.add(*batches(2))
    statuses.append(meter.measure().status)
    commit(store, first, 2)
    statuses.append(meter.measure().status)
    (last,) = plan.add([prompt("last")], sealed=True)
    statuses.append(meter.measure().status)
    commit(store, last, 1)
    statuses.append(meter.measure().status)

    assert statuses == ["waiting", "running", "waiting", "running", "done"]


def test_a_prompt_that_is_planned_again_is_one_prompt_with_its_newest_fate(
    plan: Plan, store: Store
) -> None:
    (first,) = plan.add(*batches(4))
    commit(store, first, 2, 2)
    meter = Meter(store, plan.spec.run)
    seen = [meter.measure()]

    (again,) = plan.add([prompt("one", generation=1), prompt("two", generation=1)])
    seen.append(meter.measure())
    commit(store, again, 1, 1)
    seen.append(meter.measure())

    counts = [(p.total, p.completed, p.failed, p.status) for p in seen]
    assert counts == [(4, 2, 2, "waiting"), (4, 2, 0, "running"), (4, 3, 1, "waiting")]


def test_an_object_is_read_once(plan: Plan, store: Store) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)
    meter = Meter(store, plan.spec.run)
    measured = meter.measure()
    read = []
    store.client.meta.events.register(
        "before-call.s3.GetObject", lambda params, **_: read.append(params["url_path"])
    )

    again = meter.measure()

    assert again.completed == measured.completed
    assert read == []


def test_the_file_has_exactly_these_names_and_one_writer(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)
    run = plan.spec.run
    one, two = (ProgressWriter(redis_client, hints.keys, store, run) for _ in range(2))

    assert [one.write(), two.write(), one.write()] == [True, False, True]
    written = orjson.loads(store.get(RunKeys(run).progress))
    assert list(written) == NAMES.split()
    one.leave()
    assert two.write()
    two.leave()


def test_completed_never_falls(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis
) -> None:
    plan.add(*batches(2))
    run = plan.spec.run
    writer = ProgressWriter(redis_client, hints.keys, store, run)
    writer.write()
    before = orjson.loads(store.get(RunKeys(run).progress))
    store.replace(RunKeys(run).progress, orjson.dumps(before | {"completed": 2}))

    writer.write()

    assert orjson.loads(store.get(RunKeys(run).progress))["completed"] == 2
    writer.leave()
