"""What is planned and what is done: the plan's log against the commits, kept up at small cost.

Reads plan/log/ and commits/ in S3, which are the truth; tells enqueue.py, reconcile.py and api.py
which batches still lack a commit. Each segment is read once, and commits are listed from the first
segment on that is not complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash_workers.contract.commit import committed_batches
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.store import Store
from producer.plan import read_segments

_LAST = "\U0010ffff"  # sorts behind every character that a key may have


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a run; done means committed: answered or rejected."""

    num_prompts: int
    num_prompts_done: int
    num_batches: int
    num_batches_done: int
    sealed: bool


@dataclass(slots=True)
class Ledger:
    """One run's batches. Call `refresh` before each look."""

    store: Store
    run: str
    open: dict[int, dict[str, int]] = field(default_factory=dict)  # segment -> batch -> prompts
    num_segments: int = 0
    num_batches: int = 0
    num_prompts: int = 0
    sealed: bool = False

    def refresh(self) -> None:
        """Take in new segments and new commits."""
        for segment in read_segments(self.store, self.run, self.num_segments):
            sizes = {batch.batch: len(batch.prompt_keys) for batch in segment.batches}
            self.open[segment.number] = sizes
            self.num_segments += 1
            self.num_batches += len(sizes)
            self.num_prompts += sum(sizes.values())
            self.sealed = segment.sealed
        self.open = {number: sizes for number, sizes in self.open.items() if sizes}
        if self.open:
            start = f"{RunKeys(self.run).commits}{min(self.open):06d}/"
            for number, batch in committed_batches(self.store, self.run, after=start):
                self.open.get(number, {}).pop(batch, None)

    def uncommitted(self) -> list[BatchMessage]:
        """A hint for each batch without a commit, in the order of the plan."""
        return [
            BatchMessage(self.run, number, batch)
            for number, sizes in self.open.items()
            for batch in sizes
        ]

    def progress(self) -> Progress:
        """Counts as of the last refresh."""
        sizes = [size for batches in self.open.values() for size in batches.values()]
        return Progress(
            num_prompts=self.num_prompts,
            num_prompts_done=self.num_prompts - sum(sizes),
            num_batches=self.num_batches,
            num_batches_done=self.num_batches - len(sizes),
            sealed=self.sealed,
        )


def run_names(store: Store) -> Iterator[str]:
    """Every run in the bucket, by one short listing each."""
    after = ""
    while entry := next(store.list("", after=after), None):
        name, slash, _ = entry[0].partition("/")
        if slash:
            yield name
        # Behind all that is in the run, in whichever way a store orders "a/x" and "a-1/x".
        after = f"{name}/{_LAST}" if slash else name
