"""Rows that ask what another row has asked already -> duplicates, though their ids differ.

Stands behind <- candidates.py where that is wanted; equal ids are plan.py's business. The first row
with a content is kept, be it of this call or of the plan. Compared are 60 bits of a hash: among a
hundred million prompts the chance that any two are mistaken for the same is one in 200.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from producer.candidates import Candidate, Known, Outcome
from producer.segments import PlanLog, content_of


def without_same_content(outcomes: Iterable[Outcome], log: PlanLog) -> Iterator[Outcome]:
    """The outcomes; for a row whose content another row has, that it is known."""
    planned = set(log.contents.values())
    rows: dict[int, int] = {}  # content -> key of the row in this call that has it
    for outcome in outcomes:
        if isinstance(outcome, Candidate) and _is_other_row(outcome, log, planned, rows):
            if not outcome.sample:
                yield Known(outcome.source)
        else:
            yield outcome


def _is_other_row(
    candidate: Candidate, log: PlanLog, planned: set[int], rows: dict[int, int]
) -> bool:
    """Whether another row has the candidate's content. A row that is planned is its own."""
    key, content = int(candidate.row_key, 16), content_of(candidate.content_digest)
    if key in log.contents:
        return False
    return content in planned or rows.setdefault(content, key) != key
