"""Which faults a campaign meets, and when: drawn from its seed before anything starts.

Read by campaign.py, carried out by injections.py. The same seed and numbers give the same schedule,
so that a campaign that failed can be had again. A worker's kill is of use only while its engine is
full; which fault waits for what is injections.py's business.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

KILL = "worker kill -9"
SIGTERM = "worker SIGTERM"
ENGINE_KILL = "engine kill -9"
ENGINE_HANG = "engine hangs, then is killed"
ENGINE_500 = "engine answers 500"
REDIS_RESTART = "redis restart"
REDIS_KILL = "redis kill -9"
REDIS_FREEZE = "redis silent"
FLUSHALL = "redis FLUSHALL"
S3_503 = "s3 answers 503"
S3_LOST = "s3 replies lost"
S3_RESET = "s3 connections reset"
CLOCKS = "clocks jitter"

KILLS_SHARE = 0.35  # of all faults; the law wants 0.3
OTHERS = {
    SIGTERM: 3,
    ENGINE_KILL: 3,
    ENGINE_HANG: 2,
    ENGINE_500: 2,
    REDIS_RESTART: 2,
    REDIS_KILL: 2,
    REDIS_FREEZE: 1,
    FLUSHALL: 1,
    S3_503: 2,
    S3_LOST: 2,
    S3_RESET: 2,
    CLOCKS: 2,
}
REDIS_AWAY = (REDIS_KILL, REDIS_RESTART, REDIS_FREEZE)
# What all workers lean on, or a clock that leases run by.
SHARED = (*REDIS_AWAY, FLUSHALL, S3_503, S3_LOST, S3_RESET, CLOCKS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come."""

    at_s: float  # from the first full engine on; later where it must wait
    kind: str
    victim: int  # which worker or engine
    hold_s: float  # how long it stays broken
    strength: float  # -1 to 1, for what can be more or less broken


def draw(seed: int, num_faults: int, num_workers: int, duration_s: float) -> list[Fault]:
    """Every kind at least once where there is room for it."""
    dice = random.Random(seed)
    num_kills = round(num_faults * KILLS_SHARE)
    others = list(OTHERS)
    dice.shuffle(others)
    more = iter(lambda: dice.choices(list(OTHERS), list(OTHERS.values()))[0], None)
    others += list(islice(more, max(0, num_faults - num_kills - len(others))))
    kinds = [KILL] * num_kills + others[: num_faults - num_kills]
    dice.shuffle(kinds)
    step_s = duration_s / num_faults
    return [
        Fault(
            at_s=round((number + dice.random()) * step_s, 2),
            kind=kind,
            victim=dice.randrange(num_workers),
            hold_s=round(dice.uniform(2, 6), 2),
            strength=round(dice.uniform(-1, 1), 3),
        )
        for number, kind in enumerate(kinds)
    ]
