"""What was made again, why, and how soon what a fault cut went on: from hand-made engine logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.campaign import kinds, reasons
from benchmarks.campaign.engine_log import CUT_OFF, EngineLog, Remade, Request
from benchmarks.campaign.reasons import Happened
from benchmarks.campaign.recovery import by_kind, look_at, quantile

SLOTS = {"31001": "w0", "31002": "w1", "31003": "w2"}


def asked(rid: str, engine: str, question: str, started_s: float, given: int = 0) -> dict[str, Any]:
    told = {"engine": engine, "rid": rid, "question": question}
    return told | {"num_given": given, "started_s": started_s}


def ended(told: dict[str, Any], first_s: float, moved_s: float, end: int, outcome: str) -> Any:
    return told | {"first_s": first_s, "moved_s": moved_s, "end": end, "outcome": outcome}


def read(folder: Path, entries: list[dict[str, Any]], batches: dict[str, str]) -> EngineLog:
    file = folder / "engines.tokens"
    file.write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in entries))
    log = EngineLog(folder / "engines.sqlite")
    log.read(file, SLOTS)
    for question, batch in batches.items():
        log.add_answers([question], batch)
    log.index()
    return log


def request(engine: str, started_s: float, moved_s: float, outcome: str) -> Request:
    return Request("r", engine, "q", 0, started_s, started_s, moved_s, 5, outcome)


def test_places_of_an_answer_that_two_requests_sampled_were_made_twice(tmp_path: Path) -> None:
    first, second = asked("r1", "31001", "q", 1.0), asked("r2", "31002", "q", 2.0, given=6)
    other, open_ended = asked("r3", "31001", "other", 3.0), asked("r4", "31003", "third", 4.0)
    entries = [
        first,
        ended(first, 1.1, 1.2, 10, "left"),
        {"engine": "31001", "mode": "hang", "at_s": 1.5},
        second,
        ended(second, 2.1, 2.3, 20, "stop"),
        other,
        ended(other, 3.1, 3.2, 5, "stop"),
        open_ended,
    ]

    log = read(tmp_path, entries, {})

    (again,) = log.remade()
    assert (again.request.rid, again.num_tokens) == ("r2", 4)
    assert [earlier.rid for earlier in again.earlier] == ["r1"]
    assert (log.num_requests, log.num_made) == (4, 10 + 14 + 5)
    (cut_off,) = log.of_engine("w2", 0.0, 10.0)
    assert cut_off.outcome == CUT_OFF
    log.close()


@pytest.mark.parametrize(
    ("flushed_s", "reason"),
    [
        (105.0, reasons.TAKEN_IN_A_FLUSH),
        (101.0, reasons.UNEXPLAINED),  # its holder had time to note it again
        (60.0, reasons.UNEXPLAINED),
    ],
)
def test_an_answer_made_again_by_another_is_explained_by_a_flush_between_the_two_alone(
    flushed_s: float, reason: str
) -> None:
    answered, again = request("w0", 95, 99, "stop"), request("w1", 110, 114, "stop")

    flush = Happened(kinds.REDIS_FLUSHED, "w0", flushed_s, 0.0, 4)

    assert reasons.reason_of(Remade(again, [answered], 5), [flush]) == reason


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([(kinds.WORKER_KILLED, "w0", 99.0)], reasons.in_flight_at(kinds.WORKER_KILLED)),
        ([(kinds.WORKER_TOLD, "w0", 99.0)], reasons.in_flight_at(kinds.WORKER_TOLD)),
        ([(kinds.WORKER_KILLED, "w1", 99.0)], reasons.UNEXPLAINED),  # another's worker
        ([(kinds.WORKER_KILLED, "w0", 90.0)], reasons.UNEXPLAINED),  # before it began
        (
            [(kinds.WORKER_TOLD, "w0", 99.0), (kinds.REDIS_SILENT, "w0", 97.0)],
            reasons.NOT_NOTED,
        ),
        (
            [(kinds.WORKER_TOLD, "w0", 99.0), (kinds.REDIS_FLUSHED, "w0", 105.0)],
            reasons.LOST_WITH_REDIS,
        ),
        (
            [(kinds.WORKER_TOLD, "w0", 99.0), (kinds.REDIS_KILLED, "w0", 101.0)],
            reasons.LOST_WITH_REDIS,
        ),
        (
            [(kinds.WORKER_TOLD, "w0", 99.0), (kinds.REDIS_KILLED, "w0", 109.0)],
            reasons.in_flight_at(kinds.WORKER_TOLD),  # what it noted was on the disk by then
        ),
        (
            [(kinds.WORKER_TOLD, "w0", 99.0), (kinds.REDIS_FLUSHED, "w0", 111.0)],
            reasons.in_flight_at(kinds.WORKER_TOLD),  # it was being made again already
        ),
        ([], reasons.UNEXPLAINED),
    ],
)
def test_what_ran_in_a_worker_that_went_may_be_made_again_and_nothing_else(
    faults: list[tuple[str, str, float]], reason: str
) -> None:
    cut, again = request("w0", 95, 99.2, "left"), request("w1", 110, 114, "stop")

    happened = [Happened(kind, slot, at_s, 3.0, 4) for kind, slot, at_s in faults]

    assert reasons.reason_of(Remade(again, [cut], 5), happened) == reason


def test_a_goodbye_wastes_nothing_of_what_was_cut_before_it() -> None:
    happened = [
        Happened(kinds.WORKER_KILLED, "w0", 10.0, 0.0, 12),
        Happened(kinds.WORKER_TOLD, "w1", 20.0, 0.0, 12),
    ]
    killed = Request("a", "w0", "q", 0, 9.0, 9.1, 10.0, 5, "left")
    told = Request("b", "w1", "q", 0, 19.9, None, 19.9, 0, "abort")
    again = Remade(request("w2", 30.0, 31.0, "stop"), [killed, told], 5)

    assert reasons.reason_of(again, happened) == reasons.in_flight_at(kinds.WORKER_KILLED)


def test_an_answer_that_was_sent_long_before_its_workers_death_was_not_in_flight() -> None:
    kill = Happened(kinds.WORKER_KILLED, "w0", 100.0, 0.0, 4)

    assert not reasons.is_cut_by(kill, request("w0", 95, 99.9, "stop"))
    assert reasons.is_cut_by(kill, request("w0", 95, 100.01, "stop"))  # sent to nobody
    assert reasons.is_cut_by(kill, request("w0", 95, 99.9, "left"))


def test_a_recovery_lasts_from_the_kill_to_the_batchs_next_token(tmp_path: Path) -> None:
    happened = [
        Happened(kinds.WORKER_KILLED, "w0", 100.0, 0.0, 2),
        Happened(kinds.WORKER_KILLED, "w1", 200.0, 0.0, 1),
        Happened(kinds.REDIS_KILLED, "w0", 205.0, 3.0, 0),
    ]
    entries = [
        ended(asked("1", "31001", "a1", 95), 96, 99, 5, "left"),  # of batch a, cut
        ended(asked("2", "31001", "b1", 97), 98, 101, 7, "left"),  # of batch b, cut
        ended(asked("3", "31002", "b2", 110), 119, 120, 5, "stop"),  # of batch b, elsewhere
        ended(asked("4", "31003", "a1", 111), 117, 120, 5, "stop"),
        ended(asked("5", "31002", "c1", 199), 199.5, 200, 5, "left"),  # of batch c, cut
        ended(asked("6", "31003", "c1", 221), 230, 231, 5, "stop"),
        ended(asked("7", "31001", "probe", 99), 99.1, 100, 9, "left"),  # of no batch
    ]
    log = read(tmp_path, entries, {"a1": "a", "b1": "b", "b2": "b", "c1": "c"})

    seen = [look_at(fault, happened, log, 90.0) for fault in happened]

    assert [fault.recovery_s for fault in seen] == [[17, 19], [30], []]
    assert [fault.tokens_in_flight for fault in seen] == [12, 5, 0]
    assert [fault.is_alone for fault in seen] == [True, False, True]
    killed = {found.kind: found for found in by_kind(seen)}[kinds.WORKER_KILLED]
    assert (killed.num_faults, killed.num_batches) == (2, 2)
    assert (killed.median_s, killed.p99_s) == (17, 19)
    log.close()


def test_the_99th_percentile_of_few_is_the_greatest() -> None:
    assert quantile([], 0.99) is None
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile(range(1, 1001), 0.99) == 990
