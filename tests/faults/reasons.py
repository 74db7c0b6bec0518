"""Why something was made again: which of the faults that happened explains it.

Asked by verdict.py for each request that sampled tokens which others had sampled before it. Only
what was not noted may be made again: what ran when its worker or engine was killed, what ended when
Redis was away or was emptied afterwards. Anything else has no reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults import schedule
from tests.faults.token_log import Remade, Request

UNNOTED_S = 0.5  # an answer and the kill of its worker so near: it may not have been noted yet
TAKEN_S = 6.0  # after a flush: by then its holder has renewed, heard that it lost, and noted again
CUT_S = 3.0  # an engine notices within so long that whoever asked is gone
UNSYNCED_S = 2.5  # of an append-only file that is synced every second
PAUSES_S = 8.0  # who met Redis silent asks it again after so long, at most
NOTED_AGAIN_S = 8.0  # after a flush a holder claims again, and notes again with its next answer
KILLS = (schedule.KILL, schedule.ENGINE_KILL, schedule.ENGINE_HANG)

# Why tokens were made again: beside "in flight: " and a fault.
LOST_WITH_REDIS = "its note was lost with Redis"
NOT_NOTED = "its worker left while Redis was away"
TAKEN_IN_A_FLUSH = "after a flush another claimed its batch before its holder did"
UNEXPLAINED = "for no reason that happened"
# A note is Redis' to keep: what it lost or could not take is not "made again though it was noted".
WITHOUT_NOTES = (LOST_WITH_REDIS, NOT_NOTED, TAKEN_IN_A_FLUSH)


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that was met."""

    kind: str
    slot: str
    at_s: float  # wall clock
    hold_s: float
    num_running: int


def describe(again: Remade) -> str:
    """For people."""
    lines = [f"{again.request.message!r}: {again.num_tokens} tokens made twice"]
    for request in (*again.earlier, again.request):
        lines.append(
            f"  {request.engine}: {request.num_given} to {request.end}, {request.outcome}, "
            f"{request.started_s:.2f} to {request.moved_s:.2f}"
        )
    return "\n".join(lines)


def reason_of(again: Remade, happened: list[Happened]) -> str:
    """Why a request had to make tokens that others had made."""
    for other in reversed(again.earlier):
        if other.is_answered:
            return _reason_of_answered(other, again.request, happened)
    last = again.earlier[-1]
    if fault := fault_that_cut(last, happened):
        is_mute = fault.kind == schedule.SIGTERM and _is_redis_away(fault.at_s, happened)
        return NOT_NOTED if is_mute else f"in flight: {fault.kind}"
    return UNEXPLAINED


def _reason_of_answered(answered: Request, again: Request, happened: list[Happened]) -> str:
    """An answer reached its worker, and yet it was made again."""
    answered_s = answered.moved_s
    ends = [
        fault.at_s
        for fault in happened
        if fault.kind in (schedule.KILL, schedule.SIGTERM)
        and fault.slot == answered.engine
        and answered_s - UNNOTED_S < fault.at_s < again.started_s
    ]
    for fault in happened:
        is_between = answered_s - UNNOTED_S < fault.at_s < again.started_s
        is_orphan = bool(ends) and ends[0] < fault.at_s + NOTED_AGAIN_S
        if fault.kind == schedule.FLUSHALL and is_between and is_orphan:
            return LOST_WITH_REDIS
        is_soon = again.started_s < fault.at_s + TAKEN_S and again.engine != answered.engine
        if fault.kind == schedule.FLUSHALL and is_between and is_soon and not ends:
            return TAKEN_IN_A_FLUSH
        is_unsynced = fault.at_s - UNSYNCED_S < answered_s < fault.at_s
        if fault.kind == schedule.REDIS_KILL and is_unsynced and ends:
            return LOST_WITH_REDIS
    if ends and _is_redis_away(answered_s, happened):
        return NOT_NOTED
    if ends and ends[0] - answered_s < UNNOTED_S:
        return "answered as its worker died"
    return UNEXPLAINED


def _is_redis_away(at_s: float, happened: list[Happened]) -> bool:
    """Or was a moment ago: who met it silent tries again only after a pause."""
    return any(
        fault.kind in schedule.REDIS_AWAY
        and fault.at_s - UNNOTED_S < at_s < fault.at_s + fault.hold_s + PAUSES_S
        for fault in happened
    )


def was_killed(request: Request, happened: list[Happened]) -> bool:
    """Whether it ran when its worker or engine was killed, be its last word sent to nobody."""
    fault = fault_that_cut(request, happened)
    if fault is None or fault.kind not in KILLS:
        return False
    return not request.is_answered or request.moved_s >= fault.at_s


def fault_that_cut(request: Request, happened: list[Happened]) -> Happened | None:
    """The kill of its worker or engine that ended a request, if one did."""
    for fault in happened:
        if fault.slot != request.engine or fault.kind not in (*KILLS, schedule.SIGTERM):
            continue
        hold_s = fault.hold_s if fault.kind == schedule.ENGINE_HANG else 0.0
        is_running = request.started_s <= fault.at_s <= request.moved_s + hold_s + CUT_S
        if is_running and request.moved_s <= fault.at_s + hold_s + CUT_S:
            return fault
    return None
