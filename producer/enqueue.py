"""Planned batches without a commit -> hints in Redis.

Called by api.py with each new segment while the next one is planned, and after planning. What lacks
a hint then is found by <- reconcile.py, which knows plan, commits, claims and queue, and sent by
the contract's Hints -> workers. A hint may be lost or doubled, so this only has to be nearly right:
what it misses, reconcile finds; what it doubles, a worker's claim drops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import celeryconfig
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, RunSpec, Segment
from dflash_workers.contract.terminal import err
from producer.ledger import Ledger
from producer.reconcile import lost_hints, offer

CHUNK_BATCHES = 100  # sent between two looks at the queue's length
POLL_S = 1.0
_REST = {
    RunState.PAUSED: "run {0!r} is paused: no hints are sent until `dflash-fleet resume --run {0}`",
    RunState.CANCELLED: "run {0!r} is cancelled: no hints are sent, nothing of it is answered",
}


def queue_of(spec: RunSpec) -> str:
    """The queue that workers of this run's target listen to."""
    return celeryconfig.generate_queue(spec.target.fingerprint())


def send_planned(ledger: Ledger, hints: Hints, queue: str, *, max_queued: int | None = None) -> int:
    """Offer every batch without a commit that nobody holds and no hint names; return how many.

    None of a paused or cancelled run, and says so. With `max_queued`, waits while that many are
    queued.
    """
    state = Control(ledger.store, ledger.run).state()
    if state is not RunState.ACTIVE:
        err.print(_REST[state].format(ledger.run), markup=False, soft_wrap=True)
        return 0
    messages: Iterable[BatchMessage] = lost_hints(ledger, hints, queue)
    if max_queued is not None:
        messages = _paced(messages, _Room(hints, queue, max_queued))
    return offer(ledger, hints, queue, messages)


@dataclass(slots=True)
class Sender:
    """Sends the hints of one call's plan, so that workers begin before the last row is read."""

    ledger: Ledger
    hints: Hints
    queue: str
    max_queued: int | None = None  # hints in the queue to wait at: then all are sent at the end
    is_early: bool = True  # whether to send before the end
    num_sent: int = 0
    num_segments: int = 0  # that this call wrote and of which all hints are sent

    def send_segment(self, segment: Segment) -> None:
        """Send a new segment's hints. What fails here is sent, or raised, at the end."""
        if not self.is_early or self.max_queued is not None:
            return
        run = self.ledger.run
        messages = [BatchMessage(run, segment.number, batch.batch) for batch in segment.batches]
        try:
            self.num_sent += offer(self.ledger, self.hints, self.queue, messages)
            self.num_segments += 1
        except FleetError:
            self.is_early = False

    def finish(self) -> int:
        """Send what is left, of earlier calls as well; return how many this call sent."""
        if not self.num_segments or self.num_segments < self.ledger.num_segments:
            self.num_sent += send_planned(
                self.ledger, self.hints, self.queue, max_queued=self.max_queued
            )
        return self.num_sent


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
