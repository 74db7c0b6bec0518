"""Why something was made again: which of the faults that happened explains it.

Asked by conclude.py for each request that sampled tokens which others had sampled before it. Only
what was not noted may be made again: what ran when its worker or engine was killed, what ended when
Redis was away or was emptied afterwards. Anything else has no reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.campaign import kinds
from benchmarks.campaign.engine_log import Remade, Request

UNNOTED_S = 0.5  # an answer and the kill of its worker so near: it may not have been noted yet
TAKEN_S = 6.0  # after a flush: by then its holder has renewed, heard that it lost, and noted again
CUT_S = 3.0  # an engine notices within so long that whoever asked is gone
UNSYNCED_S = 2.5  # of an append-only file that is synced every second
PAUSES_S = 8.0  # who met Redis silent asks it again after so long, at most
NOTED_AGAIN_S = 8.0  # after a flush a holder claims again, and notes again with its next answer
KILLS = (kinds.WORKER_KILLED, kinds.ENGINE_KILLED, kinds.ENGINE_HANGS)

# Why tokens were made again: beside "in flight: " and a fault.
LOST_WITH_REDIS = "its note was lost with Redis"
NOT_NOTED = "its worker left while Redis was away"
TAKEN_IN_A_FLUSH = "after a flush another claimed its batch before its holder did"
AS_IT_DIED = "answered as its worker died"
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
    lines = [f"question {again.request.question}: {again.num_tokens} tokens made twice"]
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
    # One that was cut before its first token lost nothing.
    last = next(other for other in reversed(again.earlier) if other.num_made)
    fault = fault_that_cut(last, happened)
    if fault and fault.kind == kinds.WORKER_TOLD:
        return _reason_of_told(fault, again.request, happened)
    return in_flight_at(fault.kind) if fault else UNEXPLAINED


def _reason_of_told(told: Happened, again: Request, happened: list[Happened]) -> str:
    """It noted what it had, and yet that was made again."""
    if _is_redis_away(told.at_s, happened):
        return NOT_NOTED
    for fault in happened:
        is_between = told.at_s <= fault.at_s < again.started_s
        is_unsynced = fault.at_s < told.at_s + CUT_S + UNSYNCED_S
        if fault.kind == kinds.REDIS_FLUSHED and is_between:
            return LOST_WITH_REDIS
        if fault.kind == kinds.REDIS_KILLED and is_between and is_unsynced:
            return LOST_WITH_REDIS
    return in_flight_at(told.kind)


def in_flight_at(kind: str) -> str:
    """The reason of what ran when such a fault came."""
    return f"in flight: {kind}"


def _reason_of_answered(answered: Request, again: Request, happened: list[Happened]) -> str:
    """An answer reached its worker, and yet it was made again."""
    answered_s = answered.moved_s
    ends = [
        fault.at_s
        for fault in happened
        if fault.kind in kinds.WORKERS_GO
        and fault.slot == answered.engine
        and answered_s - UNNOTED_S < fault.at_s < again.started_s
    ]
    for fault in happened:
        is_between = answered_s - UNNOTED_S < fault.at_s < again.started_s
        is_orphan = bool(ends) and ends[0] < fault.at_s + NOTED_AGAIN_S
        if fault.kind == kinds.REDIS_FLUSHED and is_between and is_orphan:
            return LOST_WITH_REDIS
        is_soon = again.started_s < fault.at_s + TAKEN_S and again.engine != answered.engine
        if fault.kind == kinds.REDIS_FLUSHED and is_between and is_soon and not ends:
            return TAKEN_IN_A_FLUSH
        is_unsynced = fault.at_s - UNSYNCED_S < answered_s < fault.at_s
        if fault.kind == kinds.REDIS_KILLED and is_unsynced and ends:
            return LOST_WITH_REDIS
    if ends and _is_redis_away(answered_s, happened):
        return NOT_NOTED
    if ends and ends[0] - answered_s < UNNOTED_S:
        return AS_IT_DIED
    return UNEXPLAINED


def _is_redis_away(at_s: float, happened: list[Happened]) -> bool:
    """Or was a moment ago: who met it silent tries again only after a pause."""
    return any(
        fault.kind in kinds.REDIS_AWAY
        and fault.at_s - UNNOTED_S < at_s < fault.at_s + fault.hold_s + PAUSES_S
        for fault in happened
    )


def is_cut_by(fault: Happened, request: Request) -> bool:
    """Whether this kill of its worker or engine ended the request, or its last word's hearer."""
    if fault.slot != request.engine or fault.kind not in (*KILLS, kinds.WORKER_TOLD):
        return False
    latest_s = fault.at_s + held_s(fault) + CUT_S
    is_running = request.started_s <= fault.at_s <= request.moved_s + held_s(fault) + CUT_S
    if not (is_running and request.moved_s <= latest_s):
        return False
    return not request.is_answered or request.moved_s >= fault.at_s


def held_s(fault: Happened) -> float:
    """How long its requests stand still before they end."""
    return fault.hold_s if fault.kind == kinds.ENGINE_HANGS else 0.0


def fault_that_cut(request: Request, happened: list[Happened]) -> Happened | None:
    """The first kill of its worker or engine that ended a request, if one did."""
    return next((fault for fault in happened if is_cut_by(fault, request)), None)
