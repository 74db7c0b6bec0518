"""What is planned and what is done: the plan's log against the commits, kept up at small cost.

Reads plan/log/ and commits/ in S3, which are the truth; tells enqueue.py, reconcile.py, finished.py
and api.py which batches still lack a commit. Each segment is read once, and commits are listed for
segments that have some and not all. Prompts are counted, not rows of generations: one is planned
again only after its rejection was committed, so at most one batch without a commit holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import celeryconfig
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import BatchMessage, Segment
from dflash_workers.contract.store import Store

NUM_LISTERS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a run; a prompt is done if its newest plan is committed: answered or rejected."""

    num_prompts: int
    num_prompts_done: int
    num_batches: int
    num_batches_done: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A segment with batches that lack a commit."""

    road: str
    priority: int
    sizes: dict[str, int]  # such a batch -> its prompts


@dataclass(slots=True)
class Ledger:
    """One run's batches. Call `refresh` before each look.

    Whoever reads or writes segments anyway may show them, in order, by `take_in`.
    """

    store: Store
    run: str
    open: dict[int, OpenSegment] = field(default_factory=dict)  # by number, in the log's order
    num_segments: int = 0
    num_batches: int = 0
    num_prompts: int = 0
    sealed: bool = False

    def refresh(self) -> None:
        """Take in new segments and new commits."""
        for segment in read_segments(self.store, self.run, self.num_segments):
            self.take_in(segment)
        there = set(self.store.folders(RunKeys(self.run).commits)) if self.open else set()
        begun = [number for number in self.open if f"{number:06d}" in there]
        with ThreadPoolExecutor(NUM_LISTERS) as listers:
            committed = dict(zip(begun, listers.map(self._committed, begun), strict=True))
        for number, batches in committed.items():
            for batch in batches:
                self.open[number].sizes.pop(batch, None)
        self.open = {number: segment for number, segment in self.open.items() if segment.sizes}

    def take_in(self, segment: Segment) -> None:
        """Add the segment that follows those known."""
        sizes = {batch.batch: len(batch.prompt_keys) for batch in segment.batches}
        self.open[segment.number] = OpenSegment(segment.road, segment.priority, sizes)
        self.num_segments += 1
        self.num_batches += len(sizes)
        self.num_prompts += sum(
            len(batch.prompt_keys) for batch in segment.batches if batch.generation == 0
        )
        self.sealed = segment.sealed

    def uncommitted(self, road: str = "ids") -> list[BatchMessage]:
        """Each batch of a road that lacks a commit, in the order of the plan."""
        return [
            BatchMessage(self.run, number, batch)
            for number, segment in self.open.items()
            if segment.road == road
            for batch in segment.sizes
        ]

    def priority_of(self, message: BatchMessage) -> int:
        """The priority of a batch's hint; that of a complete segment doesn't matter."""
        segment = self.open.get(message.segment)
        return segment.priority if segment else celeryconfig.PRIORITY_ORDINARY

    def progress(self) -> Progress:
        """Counts as of the last refresh."""
        sizes = [size for segment in self.open.values() for size in segment.sizes.values()]
        return Progress(
            num_prompts=self.num_prompts,
            num_prompts_done=self.num_prompts - sum(sizes),
            num_batches=self.num_batches,
            num_batches_done=self.num_batches - len(sizes),
            sealed=self.sealed,
        )

    def _committed(self, number: int) -> list[str]:
        return list(committed_of(self.store, self.run, number))


def committed_of(store: Store, run: str, segment: int) -> Iterator[str]:
    """The batches of one segment that have a commit."""
    for key, _size in store.list(f"{RunKeys(run).commits}{segment:06d}/"):
        yield key.rpartition("/")[2].removesuffix(".json")
