"""What is proposed of rates that were measured."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_workers.bench_result import BenchResult, Point
from dflash_workers.contract.lines import dump, load


def point(in_flight: int, tokens_per_s: float) -> Point:
    per_stream = tokens_per_s / in_flight
    return Point(in_flight, tokens_per_s, per_stream, 1.0, 0.1, 0.2, 0.5, 0, 0.0)


def result(*rates: tuple[int, float]) -> BenchResult:
    return BenchResult("r", {"version": "v"}, 256, [point(*rate) for rate in rates])


def test_an_engine_that_collapses_past_its_best_is_proposed_its_best_and_the_collapse_is_said() -> (
    None
):
    # One H200 with a model of 135M parameters, past the prepared batch sizes at 512.
    found = result((1, 447), (48, 17_720), (128, 38_126), (256, 56_052), (512, 16_099))

    summary = found.summary()

    assert (summary["max_in_flight"], summary["tokens_per_s"]) == (256, 56_052)
    assert (summary["collapses_at"], summary["collapsed_tokens_per_s"]) == (512, 16_099)


@pytest.mark.parametrize(
    ("rates", "proposed"),
    [
        ([(8, 800.0), (16, 990.0), (32, 1000.0), (64, 1000.0)], 16),
        ([(8, 800.0), (16, 960.0), (32, 1000.0)], 32),
        ([(8, 800.0)], 8),
        ([(8, 1000.0), (16, 700.0)], 8),
    ],
)
def test_the_fewest_requests_that_are_nearly_as_good_as_the_best_are_proposed(
    rates: list[tuple[int, float]], proposed: int
) -> None:
    assert result(*rates).proposed().in_flight == proposed


def test_a_rate_that_falls_little_past_the_best_is_no_collapse() -> None:
    assert result((8, 800.0), (16, 1000.0), (32, 850.0)).collapse() is None


def test_more_requests_than_the_engine_runs_are_never_proposed() -> None:
    waiting = dataclasses.replace(point(32, 1200.0), num_waiting=16)
    found = dataclasses.replace(
        result((8, 800.0), (16, 1000.0)),
        points=[
            point(8, 800.0),
            point(16, 1000.0),
            waiting,
        ],
    )

    assert found.proposed().in_flight == 16


def test_a_result_is_read_as_it_was_written() -> None:
    found = result((8, 800.0), (16, 1000.0))

    assert load(BenchResult, dump(found)) == found
