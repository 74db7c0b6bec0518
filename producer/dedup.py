"""Rows that ask what another row has asked already -> duplicates, though their ids differ.

Stands behind <- candidates.py where that is wanted; equal ids are plan.py's business. The first row
with a content is kept, be it of this call or of the plan; one that plan.py will refuse, because its
id has other content, keeps nobody out. Compared are 60 bits of a hash: among a hundred million
prompts the chance that any two are mistaken for the same is one in 200.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from producer.candidates import Candidate, Known, Outcome
from producer.contents import content_of
from producer.segments import PlanLog


def without_same_content(outcomes: Iterable[Outcome], log: PlanLog) -> Iterator[Outcome]:
    """The outcomes; for a row whose content another row has, that it is known."""
    planned = set(log.contents.values())
    seen = _Seen()
    for outcome in outcomes:
        if isinstance(outcome, Candidate) and _is_other_row(outcome, log, planned, seen):
            if not outcome.sample:
                yield Known()
        else:
            yield outcome


@dataclass(frozen=True, slots=True)
class _Seen:
    """The rows of this call."""

    contents: dict[int, int] = field(default_factory=dict)  # by key, of the first such row
    keys: dict[int, int] = field(default_factory=dict)  # by content, of the first such row


def _is_other_row(candidate: Candidate, log: PlanLog, planned: set[int], seen: _Seen) -> bool:
    """Whether another row has the candidate's content. A row that is planned is its own."""
    key, content = int(candidate.row_key, 16), content_of(candidate.content_digest)
    if key in log.contents or seen.contents.setdefault(key, content) != content:
        return False
    return content in planned or seen.keys.setdefault(content, key) != key
