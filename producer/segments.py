"""A run's log as a producer knows it, and the one way to add a segment to it.

Reads segments from <- plan/log/; written to by -> plan.py. A segment is written in the order
prompts, refusals, log entry, each once: a crash leaves objects that no segment names, and the same
segment again has the same bytes under the same keys. Such objects, and those of a lost number,
stay: readers start from the log and never list prompts, and a producer needs no right to delete.
Every segment, read or written, is shown to the ledger.py of the same call, so that nobody reads it
a second time. In memory a prompt takes 24 to 140 bytes, and 16 more where its line is known.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress, dump, dump_lines
from dflash_workers.contract.plan import read_refusals, read_segments
from dflash_workers.contract.records import PlannedBatch, Refusal, Segment
from dflash_workers.contract.store import Store
from producer.contents import Contents
from producer.drafts import Draft
from producer.known import high_halves
from producer.ledger import Ledger


@dataclass(slots=True)
class PlanLog:
    """What the log is known to list. By itself it is kept in memory only: for dry runs."""

    planned: Contents = field(default_factory=Contents)
    generations: dict[int, int] = field(default_factory=dict)  # key -> the highest, where not 0
    lines: array[int] = field(default_factory=lambda: array("Q"))  # halves: see known.py
    refused: set[int] = field(default_factory=set)  # marks
    next_number: int = 0
    sealed: bool = False

    def append(self, draft: Draft) -> bool:
        """Write the next segment; False where another producer was first. Safe to repeat."""
        self.next_number += 1
        return True

    def read_on(self, mine: Set[int] = frozenset()) -> set[int]:
        """Take in the segments that are new to us; return which of these keys they plan."""
        return set()

    @property
    def contents(self) -> dict[int, int]:
        """A planned prompt's key -> its content."""
        return self.planned.by_key()

    def take_in(self, batch: PlannedBatch) -> None:
        """Remember a batch."""
        if batch.generation:
            self.generations.update((int(key, 16), batch.generation) for key in batch.prompt_keys)
        else:
            self.planned.add(batch.prompt_keys, batch.content_digests)
            self.lines += high_halves(batch.line_digests)


@dataclass(slots=True)
class StoredLog(PlanLog):
    """The log of a run in S3."""

    ledger: Ledger = field(kw_only=True)
    # Called with each segment that this call wrote, by the thread that wrote it.
    on_written: Callable[[Segment], None] | None = None
    store: Store = field(init=False)
    run: str = field(init=False)

    def __post_init__(self) -> None:
        self.store, self.run = self.ledger.store, self.ledger.run

    def append(self, draft: Draft) -> bool:
        keys, number = RunKeys(self.run), self.next_number
        batches, body = draft.packed()
        prompts_key = refusals_key = ""
        if batches:
            prompts_key = keys.prompts(number, _body_hash(body))
            self.store.put_new(prompts_key, body)
        if draft.refusals:
            body = compress(dump_lines(draft.refusals.values()))
            refusals_key = keys.refusals(number, _body_hash(body))
            self.store.put_new(refusals_key, body)
        segment = replace(
            draft.segment(),
            number=number,
            sealed=self.sealed,
            batches=batches,
            prompts=prompts_key,
            refusals=refusals_key,
        )
        try:
            self.store.put_new(keys.segment(number), dump(segment))
        except Conflict:
            return False
        self.ledger.take_in(segment)
        self.next_number += 1
        if self.on_written:
            self.on_written(segment)
        return True

    def read_on(self, mine: Set[int] = frozenset()) -> set[int]:
        taken: set[int] = set()
        for segment in read_segments(self.store, self.run, self.next_number):
            self.ledger.take_in(segment)
            self.next_number = segment.number + 1
            self.sealed = segment.sealed
            for batch in segment.batches:
                self.take_in(batch)
                if mine:
                    taken |= mine & {int(key, 16) for key in batch.prompt_keys}
            self.refused.update(map(mark_of, read_refusals(self.store, segment)))
        return taken


def read_log(store: Store, run: str) -> StoredLog:
    """All of a run's log, as of now."""
    log = StoredLog(ledger=Ledger(store, run))
    log.read_on()
    return log


def mark_of(refusal: Refusal) -> int:
    """What makes two refusals the same: the row, where it stands, and the reason."""
    fields = (refusal.source, refusal.reason, refusal.excerpt)
    return int.from_bytes(hashlib.sha256("\0".join(fields).encode()).digest()[:16])


def _body_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
