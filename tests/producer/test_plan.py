from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load_lines
from dflash_workers.contract.records import Json, Prompt, Segment
from dflash_workers.contract.store import Store
from producer.conversations import Candidate, Rules, read_candidates
from producer.plan import (
    PlanOptions,
    PlanReport,
    _batches,
    plan,
    read_refusals,
    read_segments,
    seal,
)
from producer.sources import read_rows

RUN = "r"


def row(number: int, text: str = "") -> Json:
    return {"id": f"p{number}", "user_turns": [text or f"question {number}"]}


def plan_rows(
    store: Store,
    rows: list[Json],
    options: PlanOptions = PlanOptions(batch_size=4),  # noqa: B008
) -> PlanReport:
    return plan(store, RUN, read_candidates(read_rows(rows), Rules()), options)


def planned_ids(store: Store) -> list[str]:
    """Every id in the prompts that the log names, by the log alone."""
    return [
        prompt.id
        for segment in read_segments(store, RUN)
        for batch in segment.batches
        for prompt in load_lines(
            Prompt, store.get(RunKeys(RUN).prompts(segment.number, batch.batch))
        )
    ]


def objects(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key, _ in store.list("")}


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.plan.SEGMENT_BATCHES", 3)


def test_every_row_is_counted_with_one_fate(store: Store) -> None:
    rows = [row(1), row(2), row(1), row(2, "other content"), {"id": "p3"}]

    report = plan_rows(store, rows)

    assert (report.num_rows, report.num_planned, report.num_duplicates) == (5, 2, 1)
    assert report.refused == {"id_conflict": 1, "no_messages": 1}
    (segment,) = read_segments(store, RUN)
    assert (segment.num_rows, segment.num_refused, segment.num_duplicates) == (5, 2, 1)
    refusals = read_refusals(store, segment)
    assert [(r.source, r.reason) for r in refusals] == [
        ("row:4", "id_conflict"),
        ("row:5", "no_messages"),
    ]


@pytest.mark.usefixtures("small_segments")
def test_planning_the_same_rows_again_writes_nothing_whatever_the_batch_size(store: Store) -> None:
    rows = [row(n) for n in range(30)] + [{"id": "bad"}]
    plan_rows(store, rows)
    before = objects(store)

    again = plan_rows(store, rows)
    smaller = plan_rows(store, rows[::-1][1:], PlanOptions(batch_size=1))

    assert objects(store) == before
    assert (again.num_planned, again.num_duplicates, again.refused.total()) == (0, 30, 1)
    assert (smaller.num_planned, smaller.num_duplicates) == (0, 30)


@pytest.mark.usefixtures("small_segments")
def test_segments_are_filled_in_the_order_of_the_rows(store: Store) -> None:
    plan_rows(store, [row(n) for n in range(30)])

    sizes = [len(segment.batches) for segment in read_segments(store, RUN)]
    assert sizes == [3, 3, 2]
    assert planned_ids(store) == [f"p{n}" for n in range(30)]


def test_of_a_grown_file_only_the_new_rows_are_planned(store: Store) -> None:
    plan_rows(store, [row(n) for n in range(10)])

    report = plan_rows(store, [row(n) for n in range(15)])

    assert (report.num_planned, report.num_duplicates) == (5, 10)
    assert planned_ids(store) == [f"p{n}" for n in range(15)]


def test_an_id_planned_with_other_content_is_refused_in_a_later_call_too(store: Store) -> None:
    plan_rows(store, [row(1)])

    report = plan_rows(store, [row(1, "other content"), row(2)])

    assert report.refused == {"id_conflict": 1}
    assert planned_ids(store) == ["p1", "p2"]


@pytest.mark.usefixtures("small_segments")
def test_two_producers_at_once_plan_each_prompt_once(store: Store) -> None:
    barrier = threading.Barrier(4)

    def produce(first: int) -> PlanReport:
        barrier.wait()
        return plan_rows(store, [row(n) for n in range(first, first + 40)])

    with ThreadPoolExecutor(4) as producers:
        reports = list(producers.map(produce, [0, 10, 20, 30]))

    assert Counter(planned_ids(store)) == Counter(f"p{n}" for n in range(70))
    assert sum(report.num_planned for report in reports) == 70
    for report in reports:
        assert report.num_rows == report.num_planned + report.num_duplicates == 40


class Crash(Exception):
    """The producer dies."""


@dataclass(frozen=True, slots=True)
class CrashingStore(Store):
    """A real store whose process dies after some writes."""

    writes_left: list[int] = field(default_factory=list)  # of one number
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put_new(self, key: str, body: bytes) -> None:
        with self.lock:
            if self.writes_left[0] == 0:
                raise Crash
            self.writes_left[0] -= 1
        Store.put_new(self, key, body)


def crashing_after(store: Store, num_writes: int) -> CrashingStore:
    facts = {f.name: getattr(store, f.name) for f in dataclasses.fields(Store)}
    return CrashingStore(**facts, writes_left=[num_writes])


@pytest.mark.usefixtures("small_segments")
def test_a_crash_after_any_write_and_the_same_call_give_the_same_plan(store: Store) -> None:
    rows = [row(n) for n in range(14)] + [{"id": "bad"}] + [row(n) for n in range(14, 18)]
    whole = dataclasses.replace(store, prefix=f"{store.prefix}/whole")
    plan_rows(whole, rows)
    num_writes = len(objects(whole))
    assert num_writes == 5 + 2 + 1  # batches, segments, refusals

    for crash_at in range(num_writes):
        broken = dataclasses.replace(store, prefix=f"{store.prefix}/{crash_at}")
        with pytest.raises(Crash):
            plan_rows(crashing_after(broken, crash_at), rows)
        plan_rows(broken, rows)

        assert list(read_prompt_keys(broken)) == list(read_prompt_keys(whole))
        assert planned_ids(broken) == planned_ids(whole)
        assert [r.source for s in read_segments(broken, RUN) for r in read_refusals(broken, s)] == [
            "row:15"
        ]


def read_prompt_keys(store: Store) -> Iterator[tuple[int, str, list[str]]]:
    for segment in read_segments(store, RUN):
        for batch in segment.batches:
            yield segment.number, batch.batch, batch.prompt_keys


def test_what_a_crashed_call_left_does_not_stop_the_same_prompts_out_of_another_file(
    store: Store,
) -> None:
    rows = [row(1), {"id": "bad"}]
    with pytest.raises(Crash):
        plan_rows(crashing_after(store, 2), rows)  # prompts and refusals, no segment

    moved = [{"id": "another bad one"}, row(1)]
    report = plan_rows(store, moved)

    assert (report.num_planned, report.refused.total()) == (1, 1)
    assert planned_ids(store) == ["p1"]
    (segment,) = read_segments(store, RUN)
    assert [r.source for r in read_refusals(store, segment)] == ["row:1"]


def test_a_seal_is_the_last_segment_and_refuses_new_prompts_only(store: Store) -> None:
    plan_rows(store, [row(1)])

    first, second = seal(store, RUN), seal(store, RUN)

    assert first == second
    assert [s.sealed for s in read_segments(store, RUN)] == [False, True]
    assert plan_rows(store, [row(1)]).num_duplicates == 1
    with pytest.raises(BadInput, match="sealed"):
        plan_rows(store, [row(2)])


def test_nothing_is_planned_behind_a_seal_in_a_race(store: Store) -> None:
    barrier = threading.Barrier(2)

    def produce(number: int) -> None:
        barrier.wait()
        plan_rows(store, [row(number)])

    def end() -> Segment:
        barrier.wait()
        return seal(store, RUN)

    with ThreadPoolExecutor(2) as producers:
        planned, sealed = producers.submit(produce, 1), producers.submit(end)

    assert sealed.result().sealed
    segments = list(read_segments(store, RUN))
    assert [s.sealed for s in segments] == [False] * (len(segments) - 1) + [True]
    refused = planned.exception()  # where the seal was first
    assert (refused is None) == (planned_ids(store) == ["p1"])


def test_too_many_refused_rows_end_the_call_before_anything_is_written(store: Store) -> None:
    options = PlanOptions(max_refused_share=0.1)

    with pytest.raises(BadInput, match=r"2 of 4 rows refused.*2 no_messages"):
        plan_rows(store, [row(1), row(2), {}, {"id": "x"}], options)

    assert objects(store) == {}


def test_rows_that_are_all_refused_are_still_on_record(store: Store) -> None:
    plan_rows(store, [{"id": "bad"}])
    before = objects(store)

    plan_rows(store, [{"id": "bad"}])

    (segment,) = read_segments(store, RUN)
    assert [r.reason for r in read_refusals(store, segment)] == ["no_messages"]
    assert objects(store) == before


def test_a_dry_run_counts_and_writes_nothing(store: Store) -> None:
    rows = [row(1), row(1), {"id": "bad"}, row(2)]

    dry = plan_rows(store, rows, PlanOptions(batch_size=4, dry_run=True))

    assert objects(store) == {}
    assert dry == plan_rows(store, rows)


@given(st.lists(st.integers(0, 40), unique=True, min_size=1), st.integers(1, 9))
def test_batch_ids_depend_on_nothing_but_content(numbers: list[int], size: int) -> None:
    def ids(source: str) -> list[str]:
        rows = [(f"{source}:{n}", row(n)) for n in numbers]
        candidates = [c for c in read_candidates(rows, Rules()) if isinstance(c, Candidate)]
        return [batch.batch for batch, _ in _batches(candidates, size)]

    assert ids("a") == ids("b")
    assert len(set(ids("a"))) == -(-len(numbers) // size)
    assert all(len(name) == 24 for name in ids("a"))
