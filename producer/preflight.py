"""A look at all outcomes before the first of them is planned.

Stands between <- candidates.py and -> plan.py where a call is to plan nothing at all if too many
rows are refused, or if an id comes twice. What was read is kept on disk meanwhile, so that inputs
which can be read only once (stdin, generators) are as good as files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import orjson

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Refusal
from producer.candidates import Candidate, Known, Outcome
from producer.spool import opened_spool


def checked(
    outcomes: Iterable[Outcome], max_refused_share: float, *, refuse_duplicates: bool = False
) -> Iterator[Outcome]:
    """The same outcomes, or BadInput before the first of them. The share is 0..1."""
    refused: Counter[str] = Counter()
    sources: dict[int, str] = {}  # of each id, where duplicates matter
    num_rows = 0
    with opened_spool() as spool:
        for outcome in outcomes:
            spool.add(outcome)
            if isinstance(outcome, Refusal):
                refused[outcome.reason] += 1
            elif isinstance(outcome, Candidate) and outcome.sample:
                continue  # no row of its own
            elif isinstance(outcome, Candidate) and refuse_duplicates:
                _check_new(outcome, sources)
            num_rows += outcome.num_rows if isinstance(outcome, Known) else 1
        _check_share(refused, num_rows, max_refused_share)
        yield from spool.read()


def check_share(share: float) -> None:
    """Raise BadInput for what is no share."""
    if not 0 <= share <= 1:
        raise BadInput(f"max bad must be from 0 to 100 %, not {share:%}")


def _check_new(candidate: Candidate, sources: dict[int, str]) -> None:
    earlier = sources.setdefault(int(candidate.key, 16), candidate.source)
    if earlier is not candidate.source:
        row_id = orjson.loads(candidate.line)["id"]
        raise BadInput(
            f"{candidate.source}: id {row_id!r} is that of {earlier}: nothing was planned"
        )


def _check_share(refused: Counter[str], num_rows: int, max_refused_share: float) -> None:
    if refused.total() > max_refused_share * num_rows:
        reasons = ", ".join(f"{n} {reason}" for reason, n in refused.most_common())
        raise BadInput(
            f"{refused.total()} of {num_rows} rows refused, over the limit of "
            f"{max_refused_share:.2%}: {reasons}: nothing was planned"
        )
