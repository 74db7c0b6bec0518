"""How soon what a fault cut was at work again: from the fault to its batch's next new token.

Asked by conclude.py; from the engines' token log alone. A kill while Redis, S3 or the clocks were
broken for everybody measures that, too; so faults that were alone are told apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.campaign import kinds
from benchmarks.campaign.engine_log import EngineLog, Request
from benchmarks.campaign.reasons import CUT_S, KILLS, Happened, held_s, is_cut_by
from benchmarks.campaign.result import FaultSeen, Recovery

BEFORE_S = 8.0  # so long after it is mended, who met a broken Redis or S3 may still pause
SOON_S = 20.0  # what is broken for all within so long after a kill is felt by its batches
CUTS = (*KILLS, kinds.WORKER_TOLD)


def look_at(
    fault: Happened, all_of_them: Sequence[Happened], log: EngineLog, zero_at: float
) -> FaultSeen:
    """What it cut, and when that went on."""
    cut = requests_cut_by(fault, log) if fault.kind in CUTS else []
    batches_of = {request: log.batches_of(request.question) for request in cut}
    batches = {batch for of_one in batches_of.values() for batch in of_one}
    firsts_s = (log.first_token_s(batch, fault.at_s) for batch in sorted(batches))
    return FaultSeen(
        t_s=round(fault.at_s - zero_at, 2),
        kind=fault.kind,
        victim="" if fault.kind in kinds.SHARED else fault.slot,
        hold_s=fault.hold_s,
        num_running=fault.num_running,
        tokens_in_flight=sum(r.num_made for r, of_one in batches_of.items() if of_one),
        recovery_s=[round(at_s - fault.at_s, 3) for at_s in firsts_s if at_s is not None],
        is_alone=_is_alone(fault, all_of_them),
    )


def requests_cut_by(fault: Happened, log: EngineLog) -> list[Request]:
    """Those that it ended."""
    margin_s = held_s(fault) + CUT_S
    near = log.of_engine(fault.slot, fault.at_s - margin_s, fault.at_s)
    return [request for request in near if is_cut_by(fault, request)]


def by_kind(faults: Sequence[FaultSeen]) -> list[Recovery]:
    """Of those that were alone, the kinds in the order of their names."""
    waits: dict[str, list[float]] = defaultdict(list)
    numbers: dict[str, int] = defaultdict(int)
    for fault in faults:
        numbers[fault.kind] += 1
        if fault.is_alone:
            waits[fault.kind] += fault.recovery_s
    return [
        Recovery(
            kind,
            numbers[kind],
            len(waits[kind]),
            quantile(waits[kind], 0.5),
            quantile(waits[kind], 0.99),
        )
        for kind in sorted(numbers)
    ]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that at least this share of them doesn't exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    return ordered[min(bisect_left(shares, share), len(ordered) - 1)]


def _is_alone(fault: Happened, all_of_them: Sequence[Happened]) -> bool:
    return not any(
        other.kind in kinds.SHARED
        and other is not fault
        and other.at_s < fault.at_s + SOON_S
        and other.at_s + other.hold_s > fault.at_s - BEFORE_S
        for other in all_of_them
    )
