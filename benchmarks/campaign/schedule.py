"""Which faults a campaign meets, and when: drawn from its seed before anything starts.

Read by course.py, carried out by injections.py. The same configuration gives the same schedule, so
that a campaign that failed can be had again. A kill shows something only while its victim's engine
is full; which fault waits for what is injections.py's business.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from benchmarks.campaign.configuration import Churn, Faults
from benchmarks.campaign.kinds import WORKER_KILLED, WORKER_TOLD


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come."""

    at_s: float  # from the first full engine on; later where it must wait
    kind: str
    victim: int  # which worker or engine
    hold_s: float  # how long it stays broken
    strength: float  # -1 to 1, for what can be more or less broken


def draw(seed: int, faults: Faults, churn: Churn, num_workers: int) -> list[Fault]:
    """The faults of a mix, evenly spread, and the deaths of a rate, in the order of time."""
    dice = random.Random(seed)
    drawn = _of_mix(dice, faults, num_workers) + _of_rate(dice, churn, num_workers)
    return sorted(drawn, key=lambda fault: fault.at_s)


def _of_mix(dice: random.Random, faults: Faults, num_workers: int) -> list[Fault]:
    """Every kind of the mix at least once where there is room for it."""
    if not faults.count:
        return []
    kinds = _kinds(dice, faults)
    step_s = faults.over_s / faults.count
    return [
        Fault(
            at_s=round((number + dice.random()) * step_s, 2),
            kind=kind,
            victim=dice.randrange(num_workers),
            hold_s=round(dice.uniform(*faults.hold_s), 2),
            strength=round(dice.uniform(-1, 1), 3),
        )
        for number, kind in enumerate(kinds)
    ]


def _kinds(dice: random.Random, faults: Faults) -> list[str]:
    """In their shares of the mix exactly, to within the one that each has for certain."""
    names, shares = list(faults.mix), list(faults.mix.values())
    kinds = [
        name
        for name, share in faults.mix.items()
        for _ in range(max(1, int(faults.count * share / sum(shares))))
    ]
    more = iter(lambda: dice.choices(names, shares)[0], None)
    kinds += islice(more, max(0, faults.count - len(kinds)))
    dice.shuffle(kinds)
    return kinds[: faults.count]


def _of_rate(dice: random.Random, churn: Churn, num_workers: int) -> list[Fault]:
    """Deaths as they come to spot machines: independent, at a rate."""
    if not churn.deaths_per_worker_hour:
        return []
    drawn = []
    for victim in range(num_workers):
        at_s = 0.0
        while (at_s := at_s + dice.expovariate(churn.deaths_per_worker_hour / 3600)) < churn.over_s:
            is_told = dice.random() < churn.notice_share
            kind = WORKER_TOLD if is_told else WORKER_KILLED
            drawn.append(Fault(round(at_s, 2), kind, victim, 0.0, 0.0))
    return drawn
