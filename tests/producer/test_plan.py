from __future__ import annotations

import dataclasses
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import zstandard
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_prompts, read_refusals, read_segments
from dflash_workers.contract.records import Json, Prompt, Segment
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.candidates import Candidate, Outcome, candidate_of
from producer.drafts import PlanOptions, batches_of
from producer.plan import PlanReport, plan, seal, survey
from producer.rules import Draws, Rules
from producer.segments import PlanLog, read_log
from producer.sources.inputs import read_items
from tests.producer.row_by_row import read_candidates

RUN = "r"
BY_FOUR = PlanOptions(batch_size=4)


def row(number: int, text: str = "") -> Json:
    return {"id": f"p{number}", "user_turns": [text or f"question {number}"]}


def outcomes(rows: Iterable[Json], rules: Rules | None = None) -> Iterator[Outcome]:
    return read_candidates(read_items(rows, Settings()), rules or Rules())


def plan_rows(
    store: Store, rows: Iterable[Json], options: PlanOptions = BY_FOUR, rules: Rules | None = None
) -> PlanReport:
    return plan(read_log(store, RUN), outcomes(rows, rules), options)


def planned_prompts(store: Store) -> list[Prompt]:
    """Every prompt that the log names, by the log alone."""
    return [
        prompt
        for segment in read_segments(store, RUN)
        for batch in segment.batches
        for prompt in read_prompts(store, segment, batch)
    ]


def planned_ids(store: Store) -> list[str]:
    return [prompt.id for prompt in planned_prompts(store)]


def objects(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key, _ in store.list("")}


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.drafts.SEGMENT_BATCHES", 3)


def test_every_row_is_counted_with_one_fate(store: Store) -> None:
    rows = [row(1), row(2), row(1), row(2, "other content"), {"id": "p3"}]

    report = plan_rows(store, rows)

    assert (report.num_rows, report.num_planned, report.num_duplicates) == (5, 2, 1)
    assert report.refused == {"id_conflict": 1, "no_messages": 1}
    assert report.schemas == {"user_turns": 2}
    (segment,) = read_segments(store, RUN)
    assert (segment.num_rows, segment.num_refused, segment.num_duplicates) == (5, 2, 1)
    refusals = read_refusals(store, segment)
    assert [(r.source, r.reason) for r in refusals] == [
        ("row:4", "id_conflict"),
        ("row:5", "no_messages"),
    ]


def test_a_segments_prompts_are_one_object_that_zstd_unpacks(store: Store) -> None:
    plan_rows(store, [row(n) for n in range(10)])

    (segment,) = read_segments(store, RUN)
    (key,) = [key for key in objects(store) if key.startswith(RunKeys(RUN).all_prompts)]
    assert segment.prompts == key
    with zstandard.ZstdDecompressor().stream_reader(store.get(key), read_across_frames=True) as all:
        assert all.read().count(b"\n") == 10
    assert [batch.offset for batch in segment.batches] == [
        sum(batch.num_bytes for batch in segment.batches[:n]) for n in range(3)
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


def test_a_segment_of_long_prompts_ends_early(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.drafts.SEGMENT_BYTES", 5000)

    plan_rows(store, [row(n, "long " * 400) for n in range(10)])

    assert [len(segment.batches) for segment in read_segments(store, RUN)] == [1, 1, 1]


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


def test_what_a_call_is_noted_with_stands_in_its_segment(store: Store) -> None:
    options = PlanOptions(priority=3, road="text", notes={"limit": 5})

    plan_rows(store, [row(1)], options)

    (segment,) = read_segments(store, RUN)
    assert (segment.priority, segment.road, segment.options) == (3, "text", {"limit": 5})


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


def test_a_loser_keeps_its_refusals_and_refuses_what_the_winner_planned_otherwise(
    store: Store,
) -> None:
    loser = read_log(store, RUN)
    plan_rows(store, [row(1), row(2), {"id": "bad"}])

    moved = [{"id": "bad of mine"}, row(2, "other content"), row(1), row(3)]
    report = plan(loser, outcomes(moved), BY_FOUR)

    assert (report.num_planned, report.num_duplicates, report.num_rows) == (1, 1, 4)
    assert report.refused == {"no_messages": 1, "id_conflict": 1}
    assert planned_ids(store) == ["p1", "p2", "p3"]
    *_, last = read_segments(store, RUN)
    assert (last.num_rows, last.num_refused, last.num_duplicates) == (4, 2, 1)
    assert {r.reason for r in read_refusals(store, last)} == {"no_messages", "id_conflict"}


def test_a_loser_with_nothing_left_writes_nothing(store: Store) -> None:
    loser = read_log(store, RUN)
    rows = [row(1), row(2), {"id": "bad"}]
    plan_rows(store, rows)

    report = plan(loser, outcomes([row(2), row(1)]), BY_FOUR)

    assert (report.num_planned, report.num_duplicates, report.num_rows) == (0, 2, 2)
    assert len(list(read_segments(store, RUN))) == 1


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
def test_a_crash_after_any_write_and_the_same_call_give_the_same_objects(store: Store) -> None:
    rows = [row(n) for n in range(14)] + [{"id": "bad"}, row(3), row(13)]
    rows += [row(n) for n in range(14, 27)] + [row(26), {"id": "bad"}]
    rules = Rules(draws=Draws(heldout_share=0.5))
    whole = dataclasses.replace(store, prefix=f"{store.prefix}/whole")
    plan_rows(whole, rows, rules=rules)
    expected = objects(whole)
    assert len(expected) == 3 + 3 + 2  # prompts, segments, refusals

    for crash_at in range(len(expected)):
        broken = dataclasses.replace(store, prefix=f"{store.prefix}/{crash_at}")
        with pytest.raises(Crash):
            plan_rows(crashing_after(broken, crash_at), rows, rules=rules)
        plan_rows(broken, rows, rules=rules)

        assert objects(broken) == expected


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


def test_a_row_is_planned_as_often_as_samples_are_asked_for(store: Store) -> None:
    three = Rules(draws=Draws(samples=3))
    plan_rows(store, [row(1)])

    report = plan_rows(store, [row(1), row(2), row(2)], rules=three)
    again = plan_rows(store, [row(1), row(2)], rules=three)

    assert planned_ids(store) == ["p1", "p1#1", "p1#2", "p2", "p2#1", "p2#2"]
    assert (report.num_rows, report.num_planned, report.num_resampled) == (3, 5, 4)
    assert (report.num_duplicates, again.num_duplicates, again.num_planned) == (2, 2, 0)
    *_, last = read_segments(store, RUN)
    assert (last.num_rows, last.num_resampled, last.num_duplicates) == (2, 4, 1)


def test_no_sample_is_planned_of_a_row_whose_id_has_other_content(store: Store) -> None:
    plan_rows(store, [row(1)])

    report = plan_rows(store, [row(1, "other content")], rules=Rules(draws=Draws(samples=3)))

    assert (report.num_rows, report.num_planned, report.refused) == (1, 0, {"id_conflict": 1})
    assert planned_ids(store) == ["p1"]


def test_rows_that_were_not_drawn_are_counted(store: Store) -> None:
    none = Rules(draws=Draws(weights={"row": 0.0}))

    report = plan_rows(store, [row(1), row(2)], rules=none)

    assert (report.num_rows, report.num_not_drawn, report.num_planned) == (2, 2, 0)
    assert objects(store) == {}


def test_a_prompt_is_planned_once_in_each_generation(store: Store) -> None:
    plan_rows(store, [row(1), row(2)])
    again = [
        candidate_of(dataclasses.replace(prompt, generation=1), "0" * 32)
        for prompt in planned_prompts(store)
    ]
    retry = PlanOptions(batch_size=4, generation=1, sampling={"temperature": 0.5})

    first = plan(read_log(store, RUN), again, retry)
    second = plan(read_log(store, RUN), again, retry)

    assert (first.num_planned, second.num_planned, second.num_duplicates) == (2, 0, 2)
    assert planned_ids(store) == ["p1", "p2", "p1", "p2"]
    *_, last = read_segments(store, RUN)
    assert [(b.generation, b.sampling) for b in last.batches] == [(1, {"temperature": 0.5})]
    # The row itself is what it was: known with its content, refused with another.
    assert plan_rows(store, [row(1)]).num_duplicates == 1
    assert plan_rows(store, [row(1, "other content")]).refused == {"id_conflict": 1}


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


def test_rows_that_are_all_refused_are_still_on_record(store: Store) -> None:
    plan_rows(store, [{"id": "bad"}])
    before = objects(store)

    plan_rows(store, [{"id": "bad"}])

    (segment,) = read_segments(store, RUN)
    assert [r.reason for r in read_refusals(store, segment)] == ["no_messages"]
    assert objects(store) == before


def test_a_survey_counts_what_a_plan_would_and_shows_the_first_prompts(store: Store) -> None:
    rows = [row(1), row(1), {"id": "bad"}, row(2), row(3), row(4), row(4, "other content")]

    surveyed = survey(PlanLog(), outcomes(rows), BY_FOUR)

    assert objects(store) == {}
    assert surveyed.report == plan_rows(store, rows)
    assert [prompt["id"] for prompt in surveyed.prompts] == ["p1", "p2", "p3"]


numbers = st.lists(st.integers(0, 40), max_size=30)
sizes = st.integers(1, 9)


@given(calls=st.lists(st.tuples(numbers, sizes), max_size=4))
@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_segments")
def test_however_rows_are_split_into_calls_and_batches_each_is_planned_once(
    store: Store, calls: list[tuple[list[int], int]]
) -> None:
    fresh = dataclasses.replace(store, prefix=f"{store.prefix}/{uuid.uuid4().hex}")

    reports = [
        plan_rows(fresh, [row(n) for n in numbers], PlanOptions(batch_size=size))
        for numbers, size in calls
    ]

    in_order = dict.fromkeys(n for numbers, _ in calls for n in numbers)
    assert planned_ids(fresh) == [f"p{n}" for n in in_order]
    assert sum(r.num_planned + r.num_duplicates for r in reports) == sum(len(n) for n, _ in calls)


@given(first=numbers, second=numbers, split=st.integers(0, 30))
@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_segments")
def test_however_two_producers_interleave_each_prompt_is_planned_once(
    store: Store, first: list[int], second: list[int], split: int
) -> None:
    fresh = dataclasses.replace(store, prefix=f"{store.prefix}/{uuid.uuid4().hex}")

    def rows_with_another_call_in_between() -> Iterator[Json]:
        yield from [row(n) for n in first[:split]]
        plan_rows(fresh, [row(n) for n in second], PlanOptions(batch_size=3))
        yield from [row(n) for n in first[split:]]

    plan_rows(fresh, rows_with_another_call_in_between(), PlanOptions(batch_size=2))

    assert Counter(planned_ids(fresh)) == Counter({f"p{n}": 1 for n in {*first, *second}})


@given(st.lists(st.integers(0, 40), unique=True, min_size=1), sizes)
def test_batch_ids_depend_on_nothing_but_content(numbers: list[int], size: int) -> None:
    rows = [row(n) for n in numbers]

    def ids(rows: list[Json]) -> list[str]:
        candidates = [c for c in outcomes(rows) if isinstance(c, Candidate)]
        return [batch.batch for batch in batches_of(candidates, PlanOptions(batch_size=size))]

    noted = [{**r, "topic": "x"} for r in rows]  # other metadata, other places in their file
    assert ids(rows) == ids([{"id": "bad"}, *noted])
    assert len(set(ids(rows))) == -(-len(numbers) // size)
    assert all(len(name) == 24 for name in ids(rows))
