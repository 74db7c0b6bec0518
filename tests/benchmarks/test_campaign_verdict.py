"""The ratios of a campaign: what counts as made again, and of how much."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.campaign import kinds, reasons
from benchmarks.campaign.conclude import Found, Remaking
from benchmarks.campaign.configuration import Goals
from benchmarks.campaign.oracle import Looked
from benchmarks.campaign.result import FaultSeen, ProcessSeen, Result, Series
from benchmarks.campaign.verdict import LONG_LIFE_S, is_long_lived, unmeasured_goals
from benchmarks.figures import Figure


def fault(kind: str, tokens_in_flight: int) -> FaultSeen:
    return FaultSeen(1.0, kind, "w0", 0.0, 12, tokens_in_flight, [], True)


def found(faults: list[FaultSeen], why: dict[str, int]) -> Found:
    audit = {"num_completed": 0, "findings": []}
    return Found(Looked(bytearray(3)), audit, Remaking(Counter(why)), faults, 0, 0, 0.0, 0.0)


def test_what_redis_lost_counts_apart_from_what_was_made_again_in_spite_of_its_note() -> None:
    why = {
        reasons.in_flight_at(kinds.WORKER_KILLED): 90,
        reasons.LOST_WITH_REDIS: 30,
        reasons.NOT_NOTED: 20,
        reasons.UNEXPLAINED: 10,
    }

    seen = found([fault(kinds.WORKER_KILLED, 60), fault(kinds.ENGINE_HANGS, 40)], why)

    assert seen.regenerated_ratio == pytest.approx(1.0)
    assert seen.remaking.why.total() == 150


def test_what_ran_at_a_notice_is_wasted_where_it_was_made_again_and_no_part_of_the_kills() -> None:
    why = {reasons.in_flight_at(kinds.WORKER_TOLD): 2}

    seen = found([fault(kinds.WORKER_TOLD, 200), fault(kinds.WORKER_KILLED, 50)], why)

    assert seen.wasted_share == pytest.approx(0.01)
    assert seen.num_in_flight_at_kills == 50
    assert found([fault(kinds.WORKER_KILLED, 50)], {}).wasted_share is None


def test_a_process_that_was_killed_young_says_nothing_about_growth() -> None:
    young = Series("w0", "MB", [0.0, LONG_LIFE_S - 1], [50.0, 90.0])
    old = Series("w0", "MB", [0.0, LONG_LIFE_S], [50.0, 90.0])

    assert not is_long_lived(ProcessSeen("w0", "worker", 1, 1.0, young, 20.0))
    assert is_long_lived(ProcessSeen("w0", "worker", 1, 1.0, old, 20.0))


def test_a_goal_that_nothing_was_measured_for_is_not_met() -> None:
    figures = [Figure("campaign.redis_mb", 3.0, 200.0, "lower", "MB")]

    missed = unmeasured_goals(Goals(fill=0.98, redis_mb=200.0), figures)

    assert missed == ["fill was not measured"]


def test_a_result_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    series = Series("running", "requests", [0.0, 1.0], [3.0, 4.0])
    seen = found([fault(kinds.WORKER_KILLED, 5)], {})
    result = Result(
        name="some",
        command="python -m benchmarks.campaign some.toml",
        machine="here",
        commit="",
        began_at="2026-11-30T00:00:00+00:00",
        configuration={"seed": 1},
        facts={"prompts": 3},
        figures=[],
        series=[series],
        processes=[ProcessSeen("w0", "worker", 1, 1.0, series, None)],
        stages=[],
        faults=seen.faults,
        left_out=[],
        recoveries=[],
        oracle=seen.seen(),
        broken_laws=["3 prompts without a fate"],
    )
    (tmp_path / "result.json").write_bytes(result.as_json())

    assert Result.read(tmp_path / "result.json") == result
    assert (result.oracle.num_planned, result.oracle.num_lost) == (3, 3)
