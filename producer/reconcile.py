"""Batches whose hint was lost -> hints again.

Reads the queue's own lists and the claims from Redis, plan and commits through <- ledger.py;
offers -> workers what has no commit, no holder and no hint waiting. A batch between two of these
places can look lost for a moment, so a watch sends nothing on one look: it takes two, at least one
lease apart. A hint too many is harmless, because the claim counts. Flush Redis at any moment, and
exactly the batches without a commit come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.hints import Hints, task_id
from dflash_workers.contract.keys import LEASE_MS, batch_name, parse_batch_name
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import BatchMessage
from producer.ledger import Ledger

LEASE_S = LEASE_MS / 1000


def lost_hints(ledger: Ledger, hints: Hints, queue: str) -> list[BatchMessage]:
    """Batches to be worked on or cleared that nobody holds and no waiting hint names.

    Those without a commit, in the plan's order; then those that are committed and yet pending,
    because their worker died before it cleared them: whoever claims one sees the commit and does.
    One look: good enough for a call that a person repeats. Read in the order in which a batch
    moves (queue, claim, commit), so that one which moves on meanwhile is seen at least once.
    """
    queued = hints.queued_names(queue)
    pending, inflight = (
        _names(hints, key(ledger.run)) for key in (hints.keys.pending, hints.keys.inflight)
    )
    ledger.refresh()
    uncommitted = ledger.uncommitted()
    stale = sorted(pending - {name_of(message) for message in uncommitted})
    stale_messages = [BatchMessage(ledger.run, *parse_batch_name(name)) for name in stale]
    return [
        message
        for message in [*uncommitted, *stale_messages]
        if name_of(message) not in inflight and task_id(message) not in queued
    ]


def offer(ledger: Ledger, hints: Hints, queue: str, messages: Iterable[BatchMessage]) -> int:
    """Send hints for batches, each with its segment's priority; return how many."""
    return sum(
        hints.offer(group, queue, priority)
        for priority, group in groupby(messages, key=ledger.priority_of)
    )


def _names(hints: Hints, key: str) -> set[str]:
    with translated_redis(hints.where):
        return {name.decode() for name in cast("list[bytes]", hints.redis.zrange(key, 0, -1))}


def forget_hints(hints: Hints, run: str) -> None:
    """Forget what is pending of a cancelled run; its hints, wherever they are, get dropped."""
    with translated_redis(hints.where):
        hints.redis.delete(hints.keys.pending(run))


def name_of(message: BatchMessage) -> str:
    """A batch's name in Redis."""
    return batch_name(message.segment, message.batch)


@dataclass(frozen=True, slots=True)
class Suspects:
    """What one look gave reason to suspect; a second one convicts."""

    at_s: float  # monotonic
    names: frozenset[str]


@dataclass(slots=True)
class Reconciler:
    """Looks and sends, as often as it is called."""

    ledger: Ledger
    hints: Hints
    queue: str
    state: RunState = RunState.ACTIVE  # the run's, as of the last call
    before: Suspects | None = None
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        self.control = Control(self.ledger.store, self.ledger.run)

    def look(self) -> int:
        """One look; return how many batches were offered again. Nothing of a run that isn't active.

        A look within a lease of the last one is none, but for `state`.
        """
        self.state = self.control.state()
        if self.state is not RunState.ACTIVE:
            self.before = None
            return 0
        now_s = time.monotonic()
        if self.before and now_s - self.before.at_s < LEASE_S:
            return 0
        lost = lost_hints(self.ledger, self.hints, self.queue)
        known = self.before.names if self.before else frozenset()
        self.before = Suspects(now_s, frozenset(map(name_of, lost)))
        again = [message for message in lost if name_of(message) in known]
        return offer(self.ledger, self.hints, self.queue, again)
