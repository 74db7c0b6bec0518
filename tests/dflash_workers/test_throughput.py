"""The rate of a run: what a simulated fleet really does, whoever joins and leaves."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import uuid_utils

from dflash_workers.contract.hints import Hints
from dflash_workers.throughput import (
    WINDOW_S,
    Noted,
    Stretch,
    prompts_per_s,
    read_noted,
    spread_of_rates,
)

START_S = 1_800_000_000.0
BATCH = 64
NUM_BATCHES = 8  # at once
IN_FLIGHT = 48
ANSWER_S = 60.0  # on average, of lengths that vary as much as they are long
WORKERS_PER_S = IN_FLIGHT / ANSWER_S  # prompts that one worker ends


@dataclass
class Fleet:
    """Workers that keep their engines full, prompt after prompt; a batch ends with its last one."""

    chance: random.Random
    now_s: float = START_S
    commits: list[Stretch] = field(default_factory=list)
    workers: dict[str, list[list[float]]] = field(default_factory=dict)  # since, started, ended
    ends: list[tuple[float, str, int, float]] = field(default_factory=list)
    names: int = 0

    def join(self, num_workers: int) -> None:
        for _ in range(num_workers):
            name = f"w{self.names}"
            self.names += 1
            self.workers[name] = [[self.now_s, 0, 0] for _ in range(NUM_BATCHES)]
            for _ in range(IN_FLIGHT):
                self._ask(name)

    def leave(self, num_workers: int) -> None:
        """Without a word: what their batches hold counts no more until they are claimed again."""
        for name in list(self.workers)[:num_workers]:
            del self.workers[name]

    def go_on(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.ends and self.ends[0][0] <= until_s:
            self.now_s, name, number, since_s = heapq.heappop(self.ends)
            if name in self.workers:
                self._end(name, number, since_s)
        self.now_s = until_s

    def noted(self) -> list[Noted]:
        return [
            Noted((0, f"{name} {number}"), int(batch[2]), batch[0])
            for name, batches in self.workers.items()
            for number, batch in enumerate(batches)
        ]

    def rate(self) -> float:
        return prompts_per_s(self.stretches(), self.now_s)

    def stretches(self) -> list[Stretch]:
        held = [Stretch(b.num_prompts, b.since_s or 0, self.now_s) for b in self.noted()]
        return self.commits + held

    def _ask(self, name: str) -> None:
        """The first batch that has a prompt left goes first."""
        batches = self.workers[name]
        number = next(n for n, batch in enumerate(batches) if batch[1] < BATCH)
        batches[number][1] += 1
        end_s = self.now_s + self.chance.expovariate(1 / ANSWER_S)
        heapq.heappush(self.ends, (end_s, name, number, batches[number][0]))

    def _end(self, name: str, number: int, since_s: float) -> None:
        batch = self.workers[name][number]
        assert batch[0] == since_s
        batch[2] += 1
        if batch[2] == BATCH:
            self.commits.append(Stretch(BATCH, batch[0], self.now_s))
            self.workers[name][number] = [self.now_s, 0, 0]
        self._ask(name)


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_is_within_a_tenth_a_window_after_workers_joined_or_left(seed: int) -> None:
    fleet = Fleet(random.Random(seed))
    shares = []

    for num_joining, num_leaving in ((7, 0), (7, 0), (0, 7)):
        fleet.join(num_joining)
        fleet.leave(num_leaving)
        fleet.go_on(WINDOW_S)
        for _ in range(20):
            fleet.go_on(30)
            shares.append(fleet.rate() / (len(fleet.workers) * WORKERS_PER_S))

    assert all(0.9 < share < 1.1 for share in shares), shares


def test_between_two_sizes_of_the_fleet_the_rate_is_between_theirs() -> None:
    fleet = Fleet(random.Random(1))
    fleet.join(4)
    fleet.go_on(2000)
    fleet.join(4)
    rates = []

    for _ in range(10):
        fleet.go_on(60)
        rates.append(fleet.rate() / WORKERS_PER_S)

    assert all(3.5 < rate < 8.8 for rate in rates), rates
    assert rates[-1] > rates[0] + 2


def test_a_batch_that_takes_longer_than_the_window_counts_by_what_is_noted_of_it() -> None:
    long = Stretch(100, START_S - 2 * WINDOW_S, START_S)

    assert prompts_per_s([long], START_S) == pytest.approx(50 / WINDOW_S)


@pytest.mark.parametrize(
    ("stretches", "rate"),
    [
        ([], 0.0),
        ([Stretch(5, START_S - 5000, START_S - WINDOW_S - 1)], 0.0),  # long ago
        ([Stretch(0, START_S - 10, START_S)], 0.0),
        ([Stretch(8, START_S - 36, START_S)], 8 / 36),
        ([Stretch(8, START_S + 50, START_S + 90)], 8.0),  # of a clock that goes before
        ([Stretch(8, START_S - 40, START_S + 90)], 8 / 40),
        ([Stretch(8, START_S, START_S)], 8.0),
        ([Stretch(8, START_S - 10, START_S - 20)], 0.8),  # of a clock that was set back
    ],
)
def test_no_clock_makes_a_rate_negative_or_endless(stretches: list[Stretch], rate: float) -> None:
    assert prompts_per_s(stretches, START_S) == pytest.approx(rate)


@pytest.mark.parametrize("num_joining", [0, 4])
@pytest.mark.parametrize("seed", range(2))
def test_the_slow_and_the_fast_pace_hold_the_rate_between_them(seed: int, num_joining: int) -> None:
    fleet = Fleet(random.Random(seed))
    fleet.join(6)
    fleet.go_on(2000)
    fleet.join(num_joining)
    fleet.go_on(200)

    slow, fast = spread_of_rates(fleet.stretches(), fleet.now_s)

    now = len(fleet.workers) * WORKERS_PER_S
    assert 0 < slow <= fleet.rate() <= fast
    assert slow <= 1.1 * now and fast >= 0.9 * now  # of the fleet as it is by now
    if num_joining:
        assert slow < 0.8 * now  # minutes before they joined are among those looked at


def test_of_a_steady_stretch_every_part_is_equally_fast() -> None:
    steady = [Stretch(60, START_S - WINDOW_S, START_S)]

    assert spread_of_rates(steady, START_S) == pytest.approx((60 / WINDOW_S, 60 / WINDOW_S))


def test_where_nothing_ended_for_most_of_the_time_the_slow_pace_is_none() -> None:
    slow, fast = spread_of_rates(
        [Stretch(60, START_S - 550, START_S - 500), Stretch(1, START_S - 600, START_S - 599)],
        START_S,
    )

    assert slow == 0
    assert fast > 0


def test_prompts_are_noted_once_however_many_turns_they_have_had(
    hints: Hints, redis_client: redis.Redis
) -> None:
    keys, attempt = hints.keys, str(uuid_utils.uuid7())
    redis_client.zadd(keys.inflight("run"), {"0/a": 1, "3/left": 2, "4/new": 3})
    redis_client.set(keys.lease("run", "0/a"), attempt)
    rows: dict[Any, Any] = {
        "k1:0": "row",
        "k1:1": "row",
        "k1:2:partial": "row",
        "k2:0:partial": "row",
    }
    redis_client.hset(keys.journal("run", "0/a"), mapping=rows)
    redis_client.hset(keys.journal("run", "3/left"), mapping={"k3:0": "row", "k4:0": "row"})

    held, left, new = read_noted(hints.redis, keys, "run")

    assert (held.at, held.num_prompts) == ((0, "a"), 1)
    assert held.since_s is not None
    assert abs(held.since_s - time.time()) < 60
    assert (left.at, left.num_prompts, left.since_s) == ((3, "left"), 2, None)
    assert (new.at, new.num_prompts, new.since_s) == ((4, "new"), 0, None)
