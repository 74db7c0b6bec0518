"""One batch as the real Redis and S3 hold it, and the book of what must be so.

Used by claims_players.py and test_claims_interleaved.py. The book notes, by the scripts' answers
alone, who holds the batch and when its entry was last set; an answer that contradicts it is an
error. A hand-over is a generator that pauses between its three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import celeryconfig
from dflash_workers.claims import Claim, Claims
from dflash_workers.contract.commit import read_commit, read_rows, seal_rows
from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    BatchMessage,
    Commit,
    Prompt,
    Row,
)
from tests.producer.campaign import Campaign

APART_MS = 10_000_000  # between the deadlines of two hand-overs, all of which are over at once
ANSWER = Answer(0, [1], [2], [1], "", "", [], "stop", 0, 0.1, 1)

Pauses = Generator[None, None, None]
Moves = dict[str, Callable[[], object]]


@dataclass
class Book:
    """What must be so, after all that was answered."""

    holder: str = ""  # the attempt that was told that it holds
    num_settings: int = 0  # of the entry in inflight
    is_cleared: bool = False  # by another than the holder
    noted: set[str] = field(default_factory=set)  # prompts, since the last flush
    has_zombie_row: bool = False  # noted without the lease, or after the commit
    is_hint_lost: bool = False
    commit: Commit | None = None

    def hold(self, attempt: str) -> None:
        self.holder, self.is_cleared = attempt, False
        self.num_settings += 1


@dataclass
class Batch:
    """One planned batch and all that stands about it."""

    campaign: Campaign
    claims: Claims
    message: BatchMessage
    prompts: list[Prompt]
    book: Book = field(default_factory=Book)
    late_puts: list[tuple[str, bytes]] = field(default_factory=list)
    num_handovers: int = 0

    @property
    def name(self) -> str:
        return batch_name(self.message.segment, self.message.batch)

    @property
    def queues(self) -> list[str]:
        """kombu's lists, the first in line first."""
        queue = self.campaign.queue
        return [f"{queue}\x06\x16{s}" if s else queue for s in celeryconfig.PRIORITY_STEPS]

    def begin(self, verb: str, *args: str | int) -> Any:
        """The first step of a hand-over alone; its deadline is over, and no other has it."""
        self.num_handovers += 1
        name = "" if verb == "reap" else self.name
        handover_ms = -APART_MS * self.num_handovers
        return self.claims._call(self.message.run, verb, name, *args, handover_ms)

    def finish(self, deadline_ms: int) -> Pauses:
        """The other two steps: settled exactly if nobody has set the entry in between."""
        self.book.num_settings += 1
        num_settings = self.book.num_settings
        yield
        self.send_hint()
        yield
        moved = self.claims._call(self.message.run, "settle", self.name, deadline_ms)
        assert moved == (self.book.num_settings == num_settings)
        self.book.num_settings += moved

    def sweep(self) -> Pauses:
        """Claims.reap in its three steps."""
        deadline_ms, *names = self.begin("reap", 50)
        if names:
            assert names == [self.name.encode()]
            assert not self.book.holder
            yield from self.finish(deadline_ms)

    def send_hint(self) -> None:
        self.campaign.hints.give_back(self.message, self.campaign.queue)

    def pop_hint(self) -> bool:
        return any(self.campaign.hints.redis.rpop(name) for name in self.queues)

    def find_commit(self) -> Commit | None:
        """The commit, which never changes and whose data is there."""
        message, store = self.message, self.campaign.store
        try:
            commit = read_commit(store, message.run, message.segment, message.batch)
        except Missing:
            assert self.book.commit is None
            return None
        assert self.book.commit in (None, commit)
        assert [row.key for row in read_rows(store, commit)] == [p.key for p in self.prompts]
        self.book.commit = commit
        return commit


def sealed(claim: Claim, prompts: list[Prompt]) -> tuple[Commit, bytes]:
    """The same commit and data whenever this attempt tries."""
    rows = [
        Row(p.key, p.id, p.generation, p.heldout, p.source, p.turns[0].messages, p.tools, [ANSWER])
        for p in prompts
    ]
    body, sha256 = seal_rows(rows)
    message = claim.message
    commit = Commit(
        schema=SCHEMA_VERSION,
        run=message.run,
        segment=message.segment,
        batch=message.batch,
        attempt=claim.attempt,
        data_key=RunKeys(message.run).data(message.segment, message.batch, claim.attempt),
        sha256=sha256,
        data_bytes=len(body),
        num_rows=len(rows),
        rejected=[],
        input_tokens=0,
        output_tokens=0,
        started_at=0.0,
        finished_at=0.0,
        worker="",
        engine={},
    )
    return commit, body
