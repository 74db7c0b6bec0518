from __future__ import annotations

from collections.abc import Iterable

import orjson

from dflash_workers.contract.records import Json
from producer.candidates import Candidate, Known
from producer.dedup import without_same_content
from producer.drafts import PlanOptions
from producer.plan import plan
from producer.rules import Draws, Rules
from producer.segments import PlanLog
from tests.producer.row_by_row import read_candidates


def row(row_id: str, text: str) -> Json:
    return {"id": row_id, "user_turns": [text]}


def kept(log: PlanLog, rows: Iterable[Json], samples: int = 1) -> list[str]:
    """Plan rows in memory; return the ids planned, and "-" for each that was known."""
    ids = []

    def noted() -> Iterable[Candidate]:
        items = [(f"f:{n}", r) for n, r in enumerate(rows, start=1)]
        outcomes = read_candidates(items, Rules(draws=Draws(samples)))
        for outcome in without_same_content(outcomes, log):
            assert isinstance(outcome, Candidate | Known)
            if isinstance(outcome, Known):
                ids.append("-")
            else:
                ids.append(orjson.loads(outcome.line)["id"])
                yield outcome

    plan(log, noted(), PlanOptions())
    return ids


def test_the_first_row_with_a_content_is_kept() -> None:
    assert kept(PlanLog(), [row("a", "x"), row("b", "x"), row("c", "y"), row("d", "x")]) == [
        *("a", "-", "c", "-")
    ]


def test_what_another_call_has_planned_is_known_under_any_id() -> None:
    log = PlanLog()
    kept(log, [row("a", "x")])

    assert kept(log, [row("b", "x"), row("a", "x"), row("c", "y")]) == ["-", "a", "c"]


def test_samples_go_with_their_row() -> None:
    log = PlanLog()

    assert kept(log, [row("a", "x"), row("b", "x")], samples=2) == ["a", "a#1", "-"]
    assert kept(log, [row("a", "x"), row("b", "x")], samples=3) == ["a", "a#1", "a#2", "-"]


def test_a_row_that_is_refused_for_its_id_keeps_nobody_out() -> None:
    rows = [row("a", "x"), row("a", "y"), row("b", "y")]
    items = [(f"f:{n}", r) for n, r in enumerate(rows, start=1)]

    # All at once, as a shuffle reads them: nothing is planned before the last of them.
    outcomes = list(without_same_content(read_candidates(items, Rules()), PlanLog()))
    report = plan(PlanLog(), outcomes, PlanOptions())

    assert (report.num_planned, report.refused) == (2, {"id_conflict": 1})
