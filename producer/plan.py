"""Candidates -> the plan in S3: batches named by their content, listed in an append-only log.

Takes candidates and refusals from <- conversations.py; enqueue.py and reconcile.py read the log.
A prompt is planned when a segment of the log lists it, and once only: whoever loses a segment's
number takes the winner's segment in, drops what that has, and writes the next. Written in this
order: prompts, refusals, segment; so a crash leaves objects that no segment names and the same
call again writes the same plan. Such objects, and those of a lost number, stay: readers start from
the log and never list prompts, and a producer needs no right to delete.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import (
    compress,
    decompress,
    dump,
    dump_lines,
    load,
    load_lines,
)
from dflash_workers.contract.records import SCHEMA_VERSION, Json, PlannedBatch, Refusal, Segment
from dflash_workers.contract.store import Store
from producer.conversations import Candidate

SEGMENT_BATCHES = 1000
SEGMENT_BYTES = 1 << 26  # of prompts: what a producer holds in memory at once
NUM_WRITERS = 16
GENERATION = 0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How one call plans."""

    batch_size: int = 16  # prompts
    max_refused_share: float = 1.0  # 0..1; a larger share ends the call before it writes more
    dry_run: bool = False  # count, write nothing
    notes: Json = field(default_factory=dict)  # noted in the log

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadInput(f"batch size must be at least 1, not {self.batch_size}")
        if not 0 <= self.max_refused_share <= 1:
            raise BadInput(f"max bad must be from 0 to 100 %, not {self.max_refused_share:%}")


@dataclass(slots=True)
class PlanReport:
    """What one call did: num_rows = num_planned + num_duplicates + all refused."""

    num_rows: int = 0
    num_planned: int = 0
    num_heldout: int = 0  # of the planned
    num_duplicates: int = 0
    num_batches: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason, known ones included


def plan(
    store: Store, run: str, items: Iterable[Candidate | Refusal], options: PlanOptions
) -> PlanReport:
    """Plan what is new among `items`. Raises BadInput where that is refused: sealed, too many bad.

    Writes nothing if nothing is new. Safe to repeat, and to run beside other producers.
    """
    planner = _Planner(store, run, options)
    planner.read_log()
    for item in items:
        planner.add(item)
    planner.flush()
    return planner.report


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


def read_segments(store: Store, run: str, first: int = 0) -> Iterator[Segment]:
    """The log from segment `first` on; numbers have no gaps, because each writer read them all."""
    for number in count(first):
        try:
            yield load(Segment, store.get(RunKeys(run).segment(number)))
        except Missing:
            return


def read_refusals(store: Store, segment: Segment) -> list[Refusal]:
    """The rows refused beside a segment."""
    if not segment.refusals:
        return []
    return load_lines(Refusal, decompress(store.get(segment.refusals)))


@dataclass(slots=True)
class _Part:
    """Rows read since the last segment."""

    candidates: dict[str, Candidate] = field(default_factory=dict)  # by key
    refusals: dict[bytes, Refusal] = field(default_factory=dict)  # new ones, by mark
    refused: Counter[str] = field(default_factory=Counter)  # known ones included
    num_duplicates: int = 0
    num_bytes: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.candidates) + self.refused.total() + self.num_duplicates

    def sources(self) -> list[str]:
        """The files that the new rows stand in."""
        sources = [c.source for c in self.candidates.values()]
        sources += [r.source for r in self.refusals.values()]
        return sorted({source.rpartition(":")[0] for source in sources})


@dataclass(slots=True)
class _Planner:
    """One call's way through its rows, with all that the log is known to hold."""

    store: Store
    run: str
    options: PlanOptions
    report: PlanReport = field(default_factory=PlanReport)
    part: _Part = field(default_factory=_Part)
    next_number: int = 0
    sealed: bool = False
    # Halves of the hashes, as bytes: a million prompts stay at about 200 MB.
    planned: dict[bytes, bytes] = field(default_factory=dict)  # key -> content
    refused: set[bytes] = field(default_factory=set)

    def read_log(self) -> None:
        """Take in the segments that are new to us."""
        for segment in read_segments(self.store, self.run, self.next_number):
            self.next_number = segment.number + 1
            self.sealed = segment.sealed
            for batch in segment.batches:
                for key, content in zip(batch.prompt_keys, batch.content_sha256, strict=True):
                    self.planned[bytes.fromhex(key)] = _half(content)
            self.refused.update(map(_mark, read_refusals(self.store, segment)))

    def add(self, item: Candidate | Refusal) -> None:
        if isinstance(item, Refusal):
            self._refuse(item)
        else:
            self._settle(item)
        num_batches, rest = divmod(len(self.part.candidates), self.options.batch_size)
        if rest == 0 and (num_batches >= SEGMENT_BATCHES or self.part.num_bytes >= SEGMENT_BYTES):
            self.flush()

    def flush(self) -> None:
        """Write the rows read so far as one segment, unless none of them is new."""
        self._check_refused_share()
        while self.part.candidates or self.part.refusals:
            if self.sealed:
                raise BadInput(f"run {self.run!r} is sealed: plan new prompts in another run")
            batches = list(_batches(list(self.part.candidates.values()), self.options.batch_size))
            if self.options.dry_run or self._write(batches):
                self.report.num_batches += len(batches)
                break
        self._close_part()

    def _settle(self, candidate: Candidate) -> None:
        """Give a candidate its fate, as far as the log is known."""
        content = self.planned.get(bytes.fromhex(candidate.key))
        if (earlier := self.part.candidates.get(candidate.key)) is not None:
            content = _half(earlier.content_sha256)
        if content is None:
            self.part.candidates[candidate.key] = candidate
            self.part.num_bytes += len(candidate.line)
        elif content == _half(candidate.content_sha256):
            self.part.num_duplicates += 1
        else:
            detail = "its id was planned with other content"
            self._refuse(candidate.refused("id_conflict", detail))

    def _refuse(self, refusal: Refusal) -> None:
        self.part.refused[refusal.reason] += 1
        mark = _mark(refusal)
        if mark not in self.refused:
            self.part.refusals[mark] = refusal

    def _check_refused_share(self) -> None:
        refused = self.report.refused + self.part.refused
        num_rows = self.report.num_rows + self.part.num_rows
        if refused.total() > self.options.max_refused_share * num_rows:
            reasons = ", ".join(f"{n} {reason}" for reason, n in refused.most_common())
            raise BadInput(
                f"{refused.total()} of {num_rows} rows refused, over the limit of "
                f"{self.options.max_refused_share:.2%}: {reasons}: nothing more was planned"
            )

    def _write(self, batches: list[tuple[PlannedBatch, bytes]]) -> bool:
        """Write a segment; or, where its number is lost, take in what others wrote: False."""
        keys = RunKeys(self.run)
        with ThreadPoolExecutor(NUM_WRITERS) as writers:
            list(writers.map(self._write_prompts, batches))
        refusals_key = ""
        if self.part.refusals:
            body = compress(dump_lines(self.part.refusals.values()))
            refusals_key = keys.refusals(self.next_number, hashlib.sha256(body).hexdigest()[:16])
            self.store.put_new(refusals_key, body)
        segment = Segment(
            schema=SCHEMA_VERSION,
            number=self.next_number,
            batches=[batch for batch, _ in batches],
            sources=self.part.sources(),
            num_rows=self.part.num_rows,
            num_refused=self.part.refused.total(),
            num_duplicates=self.part.num_duplicates,
            sealed=False,
            refusals=refusals_key,
            options=self.options.notes,
        )
        try:
            self.store.put_new(keys.segment(self.next_number), dump(segment))
        except Conflict:
            self._take_in_winners()
            return False
        self.next_number += 1
        return True

    def _take_in_winners(self) -> None:
        """Read the log on, and look at the part's rows again in its light."""
        self.read_log()
        for mark in self.part.refusals.keys() & self.refused:
            del self.part.refusals[mark]
        candidates, self.part.candidates, self.part.num_bytes = self.part.candidates, {}, 0
        for candidate in candidates.values():
            self._settle(candidate)

    def _write_prompts(self, batch_and_body: tuple[PlannedBatch, bytes]) -> None:
        batch, body = batch_and_body
        # A call that lost or died may have left the same prompts here, read from another file.
        with contextlib.suppress(Conflict):
            self.store.put_new(RunKeys(self.run).prompts(self.next_number, batch.batch), body)

    def _close_part(self) -> None:
        part, self.part = self.part, _Part()
        self.report.num_rows += part.num_rows
        self.report.num_planned += len(part.candidates)
        self.report.num_heldout += sum(c.heldout for c in part.candidates.values())
        self.report.num_duplicates += part.num_duplicates
        self.report.refused += part.refused
        self.refused |= part.refusals.keys()
        for candidate in part.candidates.values():
            self.planned[bytes.fromhex(candidate.key)] = _half(candidate.content_sha256)


def _batches(candidates: list[Candidate], size: int) -> Iterator[tuple[PlannedBatch, bytes]]:
    """Batches in the order of their rows, each with its object's bytes."""
    for start in range(0, len(candidates), size):
        rows = candidates[start : start + size]
        digest = hashlib.sha256(f"generation {GENERATION}\n".encode())
        for row in rows:
            digest.update(f"{row.key} {row.content_sha256} {row.heldout:d}\n".encode())
        batch = PlannedBatch(
            batch=digest.hexdigest()[:24],
            prompt_keys=[row.key for row in rows],
            content_sha256=[row.content_sha256 for row in rows],
        )
        yield batch, b"".join(row.line + b"\n" for row in rows)


def _half(sha256: str) -> bytes:
    return bytes.fromhex(sha256[:32])


def _mark(refusal: Refusal) -> bytes:
    """What makes two refusals the same: the row, where it stands, and the reason."""
    fields = (refusal.source, refusal.reason, refusal.excerpt)
    return hashlib.sha256("\0".join(fields).encode()).digest()[:16]
