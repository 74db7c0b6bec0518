"""Candidates -> the plan in S3: segments of batches, in an append-only log.

Takes outcomes from <- candidates.py (by way of shuffle.py, preflight.py); hands segments to ->
segments.py, which writes one while the rows of the next are read. A prompt is planned when a
segment of the log lists it, and once only per generation: whoever loses a segment's number takes
the winner's in, drops what that has, and writes the next. A call that goes on where another was
killed writes the very objects that the other would have written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import orjson

from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import SCHEMA_VERSION, Json, Refusal, Segment
from dflash_workers.contract.store import Store
from producer.candidates import Candidate, Known, NotDrawn, Outcome
from producer.contents import content_of
from producer.drafts import Draft, PlanOptions
from producer.segments import PlanLog, mark_of

NUM_SHOWN = 3
NUM_SHOWN_REFUSALS = 10


@dataclass(slots=True)
class PlanReport:
    """What one call did.

    num_rows = num_planned - num_resampled + num_duplicates + num_not_drawn + all refused.
    """

    num_rows: int = 0
    num_planned: int = 0  # prompts
    num_resampled: int = 0  # of these: a row's second sample or a later one
    num_heldout: int = 0  # of the planned
    num_duplicates: int = 0
    num_not_drawn: int = 0
    num_batches: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason, known ones included
    schemas: Counter[str] = field(default_factory=Counter)  # of the planned
    first_refusals: list[Refusal] = field(default_factory=list)  # known ones included


@dataclass(frozen=True, slots=True)
class Survey:
    """What planning would do."""

    report: PlanReport
    prompts: list[Json]  # the first few as they would be planned


def plan(log: PlanLog, outcomes: Iterable[Outcome], options: PlanOptions) -> PlanReport:
    """Plan what is new among the outcomes. Raises BadInput for new prompts in a sealed run.

    Writes nothing if nothing is new. Safe to repeat, and to run beside other producers.
    """
    with ThreadPoolExecutor(1) as writer:
        planner = _Planner(log, options, writer)
        for outcome in outcomes:
            planner.add(outcome)
        planner.finish()
    return planner.report


def survey(log: PlanLog, outcomes: Iterable[Outcome], options: PlanOptions) -> Survey:
    """The same, with a few of the prompts to look at: for a log that is kept in memory only."""
    shown: list[Json] = []
    with ThreadPoolExecutor(1) as writer:
        planner = _Planner(log, options, writer)
        for outcome in outcomes:
            is_new = planner.add(outcome)
            if is_new and isinstance(outcome, Candidate) and len(shown) < NUM_SHOWN:
                shown.append(orjson.loads(outcome.line))
        planner.finish()
    return Survey(planner.report, shown)


def seal(store: Store, run: str) -> Segment:
    """End the plan; return the last segment. Safe to call twice."""
    number = 0
    while True:
        for segment in read_segments(store, run, number):
            number = segment.number + 1
            if segment.sealed:
                return segment
        last = Segment(SCHEMA_VERSION, number, [], [], 0, 0, 0, sealed=True)
        try:
            store.put_new(RunKeys(run).segment(number), dump(last))
            return last
        except Conflict:
            continue  # a producer was first: the seal goes behind its segment


class _Planner:
    """One call's way through its rows. All state is the calling thread's but the write itself."""

    def __init__(self, log: PlanLog, options: PlanOptions, writer: ThreadPoolExecutor) -> None:
        self.report = PlanReport()
        self._log = log
        self._options = options
        self._writer = writer
        self._draft = Draft(options)
        self._written: Draft | None = None  # being written, or lost and not written again yet
        self._writing: Future[bool] | None = None

    def add(self, outcome: Outcome) -> bool:
        """Give an outcome its fate; True where that is to be planned."""
        if isinstance(outcome, Candidate):
            return self._settle(outcome)
        if isinstance(outcome, Known):
            self._count_duplicates(self._draft, outcome.num_rows)
        elif isinstance(outcome, NotDrawn):
            self.report.num_not_drawn += 1
            self._draft.num_not_drawn += self._draft.is_new
        else:
            self._refuse(self._draft, outcome)
        return False

    def finish(self) -> None:
        """Write what is left."""
        self._flush()
        self._wait()
        report = self.report
        report.num_rows = report.num_planned - report.num_resampled + report.num_duplicates
        report.num_rows += report.num_not_drawn + report.refused.total()

    def _settle(self, candidate: Candidate) -> bool:
        key, content = int(candidate.key, 16), content_of(candidate.content_digest)
        generation, contents = self._options.generation, self._log.contents
        if generation:
            is_planned = self._log.generations.get(key, 0) >= generation
        else:
            is_planned = key in contents or (
                candidate.sample > 0 and self._is_refused_row(candidate, content)
            )
        if is_planned:
            self._drop(self._draft, candidate, key, content)
            return False
        if generation:
            self._log.generations[key] = generation
        else:
            contents[key] = content
        if self._draft.add(candidate):
            self._flush()
        return True

    def _is_refused_row(self, candidate: Candidate, content: int) -> bool:
        """Whether it is a sample of a row that is refused, because its id has other content."""
        return self._log.contents.get(int(candidate.row_key, 16), content) != content

    def _drop(self, draft: Draft, candidate: Candidate, key: int, content: int) -> None:
        """Count a row that is planned already; its later samples are no rows of their own."""
        if candidate.sample:
            return
        if self._options.generation or self._log.contents[key] == content:
            self._count_duplicates(draft, 1)
        else:
            detail = "its id was planned with other content"
            self._refuse(draft, candidate.refused("id_conflict", detail))

    def _count_duplicates(self, draft: Draft, num_rows: int) -> None:
        self.report.num_duplicates += num_rows
        if draft.is_new:
            draft.num_duplicates += num_rows

    def _refuse(self, draft: Draft, refusal: Refusal) -> None:
        self.report.refused[refusal.reason] += 1
        if len(self.report.first_refusals) < NUM_SHOWN_REFUSALS:
            self.report.first_refusals.append(refusal)
        mark = mark_of(refusal)
        if mark not in self._log.refused:
            self._log.refused.add(mark)
            draft.add_refusal(mark, refusal)
        draft.num_refused += draft.is_new

    def _flush(self) -> None:
        """Begin to write the rows read so far as one segment, unless none of them is new."""
        self._wait()
        if self._draft.is_new:
            self._written, self._draft = self._draft, Draft(self._options)
            self._write(self._written)

    def _write(self, draft: Draft) -> None:
        if self._log.sealed and not self._options.generation:
            raise BadInput("the run is sealed: plan new prompts in another run")
        self._writing = self._writer.submit(self._log.append, draft)

    def _wait(self) -> None:
        """Until the draft being written is written, with whichever number there was room."""
        while self._writing and self._written:
            if self._writing.result():
                self._count_planned(self._written)
                break
            self._take_in_winners(self._written)
            if not self._written.is_new:
                break
            self._write(self._written)
        self._written = self._writing = None

    def _take_in_winners(self, lost: Draft) -> None:
        """Read the log on, and look at all rows that are not written yet in its light."""
        drafts = (lost, self._draft)
        for draft in drafts:
            self._log.refused -= draft.refusals.keys()
        taken = self._log.read_on({int(c.key, 16) for draft in drafts for c in draft.candidates})
        for draft in drafts:
            draft.forget_refusals(self._log.refused)
            self._log.refused |= draft.refusals.keys()
            for candidate in draft.taken_out():
                key, content = int(candidate.key, 16), content_of(candidate.content_digest)
                if key in taken or (candidate.sample and self._is_refused_row(candidate, content)):
                    self._drop(draft, candidate, key, content)
                else:
                    draft.add(candidate)

    def _count_planned(self, draft: Draft) -> None:
        report, candidates = self.report, draft.candidates
        report.num_planned += len(candidates)
        report.num_batches += -(-len(candidates) // self._options.batch_size)
        report.num_resampled += sum(candidate.sample > 0 for candidate in candidates)
        report.num_heldout += sum(candidate.heldout for candidate in candidates)
        report.schemas.update(candidate.schema for candidate in candidates)
