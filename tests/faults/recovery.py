"""How soon a killed worker's batches are at work again: from the kill to their first new token.

Read by verdict.py from the engines' token logs. A kill while Redis, S3 or the clocks were broken
for everybody measures that, too; so the waits after kills with all of them well are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults import schedule
from tests.faults.reasons import CUT_S, Happened
from tests.faults.token_log import Request

BEFORE_S = 8.0  # so long after it is mended, who met a broken Redis or S3 may still pause
GOAL_S = 20.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Of the batches that killed workers held."""

    waits_s: list[float]  # of all, the shortest first
    waits_well_s: list[float]  # of those whose Redis, S3 and clocks were well meanwhile

    @property
    def p99_s(self) -> float | None:
        """None: Redis, S3 or a clock was broken around every kill."""
        return _p99(self.waits_well_s)

    def text(self) -> str:
        """For people."""
        return (
            f"recovery, from a worker's kill to its batch's next token: p99 {self.p99_s} s of "
            f"{len(self.waits_well_s)} batches with Redis, S3 and clocks well (goal {GOAL_S:g}); "
            f"{_p99(self.waits_s)} s of all {len(self.waits_s)}"
        )


def recovery(
    happened: list[Happened], requests: list[Request], batch_of: Mapping[int, str]
) -> Recovery:
    """`batch_of`: each prompt's batch, by the prompt's number."""
    waits_s, waits_well_s = [], []
    for kill in happened:
        if kill.kind == schedule.KILL:
            waits = _waits_after(kill, requests, batch_of)
            waits_s += waits
            waits_well_s += waits if _is_all_well(kill, happened) else []
    return Recovery(sorted(waits_s), sorted(waits_well_s))


def _waits_after(
    kill: Happened, requests: list[Request], batch_of: Mapping[int, str]
) -> list[float]:
    cut = {
        batch_of[_number(request)]
        for request in requests
        if request.engine == kill.slot
        and not request.is_answered
        and request.started_s <= kill.at_s <= request.moved_s + CUT_S
    }
    first_s: dict[str, float] = {}
    for request in requests:
        batch = batch_of[_number(request)]
        if batch in cut and request.started_s > kill.at_s and request.first_s is not None:
            first_s[batch] = min(first_s.get(batch, request.first_s), request.first_s)
    return [at_s - kill.at_s for at_s in first_s.values()]


def _is_all_well(kill: Happened, happened: list[Happened]) -> bool:
    return not any(
        fault.kind in schedule.SHARED
        and fault.at_s < kill.at_s + GOAL_S
        and fault.at_s + fault.hold_s > kill.at_s - BEFORE_S
        for fault in happened
    )


def _number(request: Request) -> int:
    found = re.search(r" prompt (\d+) ", request.message)
    assert found
    return int(found[1])


def _p99(waits_s: list[float]) -> float | None:
    return round(waits_s[int(0.99 * (len(waits_s) - 1))], 2) if waits_s else None
