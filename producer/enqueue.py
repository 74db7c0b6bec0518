"""Planned batches without a commit -> hints in Redis.

Called by api.py after planning; what lacks a hint is found by <- reconcile.py, which knows plan,
commits, claims and queue, and sent by the contract's Hints -> workers. A hint may be lost or
doubled, so this only has to be nearly right: what it misses, reconcile finds; what it doubles, a
worker's claim drops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import celeryconfig
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, RunSpec
from dflash_workers.contract.terminal import err
from producer.ledger import Ledger
from producer.reconcile import lost_hints, offer

CHUNK_BATCHES = 100  # sent between two looks at the queue's length
POLL_S = 1.0


def queue_of(spec: RunSpec) -> str:
    """The queue that workers of this run's target listen to."""
    return celeryconfig.generate_queue(spec.target.fingerprint())


def send_planned(ledger: Ledger, hints: Hints, queue: str, *, max_queued: int | None = None) -> int:
    """Offer every batch without a commit that nobody holds and no hint names; return how many.

    None of a paused or cancelled run. With `max_queued`, waits while that many are queued.
    """
    if Control(ledger.store, ledger.run).state() is not RunState.ACTIVE:
        return 0
    messages: Iterable[BatchMessage] = lost_hints(ledger, hints, queue)
    if max_queued is not None:
        messages = _paced(messages, _Room(hints, queue, max_queued))
    return offer(ledger, hints, queue, messages)


@dataclass(slots=True)
class _Room:
    """In the queue."""

    hints: Hints
    queue: str
    max_queued: int
    has_told: bool = False

    def wait(self) -> None:
        """Until fewer than `max_queued` messages are queued. Says so, once."""
        while self.hints.num_queued(self.queue) >= self.max_queued:
            if not self.has_told:
                err.print(f"{self.max_queued} hints are queued: waiting for workers to take some")
                self.has_told = True
            time.sleep(POLL_S)


def _paced(messages: Iterable[BatchMessage], room: _Room) -> Iterator[BatchMessage]:
    for number, message in enumerate(messages):
        if number % CHUNK_BATCHES == 0:
            room.wait()
        yield message
