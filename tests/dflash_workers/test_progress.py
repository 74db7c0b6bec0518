"""progress.json: its names, its truth, its one writer."""

from __future__ import annotations

import time

import orjson
import pytest
import redis

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress
from dflash_workers.contract.records import SCHEMA_VERSION, BatchMessage, Commit, Rejection
from dflash_workers.contract.store import Store
from dflash_workers.progress import Meter, ProgressWriter, measure
from tests.planned import Plan, prompt

NAMES = (
    "total completed failed rate_per_sec eta_hours total_input_tokens total_output_tokens "
    "avg_output_tokens elapsed_hours s3_uploaded s3_bytes status"
)


def commit(store: Store, message: BatchMessage, num_rows: int, num_rejected: int = 0) -> None:
    body, _sha256 = seal_rows([])
    publish(store, a_commit(message, num_rows, num_rejected), body)


def a_commit(message: BatchMessage, num_rows: int, num_rejected: int) -> Commit:
    _body, sha256 = seal_rows([])
    now = time.time()
    return Commit(
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
    assert [url.rpartition("/")[2] for url in read] == ["000001.json"]  # has more been planned?


def asked_of(store: Store) -> list[str]:
    """Keys and prefixes that are asked for from now on, below the run's own."""
    asked: list[str] = []

    def note(operation: str, name: str) -> None:
        store.client.meta.events.register(
            f"provide-client-params.s3.{operation}",
            lambda params, **_: asked.append(params[name].split("/", 2)[2]),
        )

    note("GetObject", "Key")
    note("ListObjectsV2", "Prefix")
    return asked


def test_who_counts_next_goes_on_where_the_last_one_was(plan: Plan, store: Store) -> None:
    first, second, third = plan.add(*batches(4, 3, 2))
    commit(store, first, 3, 1)
    former = Meter(store, plan.spec.run)
    former.measure()
    former.keep()
    commit(store, second, 3)
    asked = asked_of(store)

    meter = Meter(store, plan.spec.run)
    measured = meter.measure()

    assert (measured.total, measured.completed, measured.failed) == (9, 6, 1)
    assert [name for name in asked if name.startswith("commits/") and name.endswith(".json")] == [
        f"commits/000000/{second.batch}.json"
    ]
    assert meter.counted.rejections == {"why": 1}
    assert meter.counted.uncommitted == {"0": {third.batch: 2}}


def test_a_segment_is_listed_only_while_it_is_begun_and_not_done(plan: Plan, store: Store) -> None:
    (done,) = plan.add(*batches(2))
    begun, _open = plan.add([prompt("begun")], [prompt("open")])
    plan.add([prompt("later")])
    commit(store, done, 2)
    commit(store, begun, 1)
    meter = Meter(store, plan.spec.run)
    meter.measure()
    asked = asked_of(store)

    meter.measure()

    assert [name for name in asked if name.startswith("commits/")] == [
        "commits/",
        "commits/000001/",
    ]


@pytest.mark.parametrize("removed", ["plan", "commits"])
def test_a_run_that_was_removed_and_planned_anew_is_counted_anew(
    plan: Plan, store: Store, removed: str
) -> None:
    run = plan.spec.run
    (first,) = plan.add(*batches(4))
    commit(store, first, 4)
    former = Meter(store, run)
    former.measure()
    former.keep()

    if removed == "plan":
        for key, _size in list(store.list(f"{run}/plan/")):
            store.delete(key)
        plan.num_segments = 0
        plan.add([prompt("another")], [prompt("one")])
    else:
        store.delete(RunKeys(run).commit(0, first.batch))

    progress = measure(store, run)
    expected = (2, 0) if removed == "plan" else (4, 0)
    assert (progress.total, progress.completed) == expected


def test_a_long_backlog_is_counted_in_steps_and_by_whoever_has_counted_more(
    plan: Plan,
    store: Store,
    hints: Hints,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, messages = plan.spec.run, plan.add(*batches(*[1] * 5))
    for message in messages:
        commit(store, message, 1)
    monkeypatch.setattr("dflash_workers.progress._READ_AT_ONCE", 2)
    meter = Meter(store, run)
    steps = [(meter.catch_up(), meter.counted.completed) for _ in range(3)]
    one, two = (ProgressWriter(redis_client, hints.keys, store, run) for _ in range(2))

    assert steps == [(False, 2), (False, 4), (True, 5)]
    assert one.write()
    store.delete(RunKeys(run).counted)  # as if it had not been kept
    one.leave()
    assert [two.write(), one.write()] == [True, False]
    two.leave()
    asked = asked_of(store)
    assert one.write()
    assert not [name for name in asked if name.startswith("commits/0") and ".json" in name]
    one.leave()


@pytest.mark.parametrize(
    "kept", [b"", b"not zstd", compress(b"[]"), compress(b'{"version": 0}'), compress(b"{")]
)
def test_what_was_kept_and_cannot_be_used_is_counted_again(
    plan: Plan, store: Store, kept: bytes
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)
    store.replace(RunKeys(plan.spec.run).counted, kept)

    assert measure(store, plan.spec.run).completed == 2


def test_commits_without_a_shard_are_counted_until_they_have_one_or_are_in_quarantine(
    plan: Plan, store: Store
) -> None:
    first, second, third, _open = plan.add(*batches(1, 1, 1, 1))
    for message in (first, second, third):
        commit(store, message, 1)
    keys, meter = RunKeys(plan.spec.run), Meter(store, plan.spec.run)
    meter.measure()
    meter.look_for_shards()
    seen = [meter.counted.num_untokenized]

    store.put_new(keys.shard(0, first.batch), b"arrow")
    store.put_new(keys.quarantine(0, second.batch), b"{}")
    meter.look_for_shards()

    assert [*seen, meter.counted.num_untokenized, meter.counted.num_quarantined] == [3, 1, 1]


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
