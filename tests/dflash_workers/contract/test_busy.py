"""When workers had a batch: the same sum in whatever order commits are read."""

from __future__ import annotations

import dataclasses
import random

import pytest

from dflash_workers.contract.busy import GAP_S, BusyTime
from dflash_workers.contract.records import BatchMessage, Commit
from tests.dflash_workers.test_progress import a_commit


def test_a_worker_s_time_is_counted_once_however_many_batches_it_had_at_once() -> None:
    busy = BusyTime()
    for from_s, to_s in ((0, 1000), (500, 1500), (1600, 3600), (9000, 9100), (200, 300)):
        busy.add(commit_at("w1", 10_000 + from_s, 10_000 + to_s))
    busy.add(commit_at("w2", 10_000, 11_800, tp_size=4))

    assert busy.spans["w1"] == [[10_000, 13_600], [19_000, 19_100]]
    assert busy.gpu_hours() == pytest.approx((3600 + 100) / 3600 + 4 * 0.5)


def test_busy_spans_are_the_same_in_whatever_order_commits_are_read() -> None:
    chance = random.Random(3)
    made = [(s := chance.uniform(0, 40_000), s + chance.uniform(0, 300)) for _ in range(60)]
    expected = spans_by_seconds(made)

    for _ in range(5):
        chance.shuffle(made)
        busy = BusyTime()
        for from_s, to_s in made:
            busy.add(commit_at("w", from_s, to_s))
        assert busy.spans["w"] == expected


def spans_by_seconds(made: list[tuple[float, float]]) -> list[list[float]]:
    """By sorting, the other way to join intervals."""
    spans: list[list[float]] = []
    for from_s, to_s in sorted(made):
        if spans and from_s <= spans[-1][1] + GAP_S:
            spans[-1][1] = max(spans[-1][1], to_s)
        else:
            spans.append([from_s, to_s])
    return spans


def commit_at(worker: str, from_s: float, to_s: float, tp_size: int = 1) -> Commit:
    return dataclasses.replace(
        a_commit(BatchMessage("run", 0, "b"), 1, 0),
        worker=worker,
        started_at=from_s,
        finished_at=to_s,
        engine={"tp_size": tp_size},
    )
