"""Planned batches without a commit -> hints in Redis.

Reads the plan and the commits through <- ledger.py and who holds what from Redis; sends through
the contract's Hints -> workers. A hint may be lost or doubled, so this only has to be nearly right:
what it misses, reconcile.py sends; what it doubles, a worker's claim drops.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import cast

import celeryconfig
from dflash_workers.contract.hints import Hints, translated_redis
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import BatchMessage, RunSpec
from producer.ledger import Ledger

CHUNK_BATCHES = 100  # sent between two looks at the queue's length
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Claims:
    """Names of the batches that Redis knows of."""

    pending: frozenset[str]  # a hint was sent, nobody has claimed it yet
    inflight: frozenset[str]  # somebody works on it

    def holds(self, name: str) -> bool:
        return name in self.pending or name in self.inflight


def queue_of(spec: RunSpec) -> str:
    """The queue that workers of this run's target listen to."""
    return celeryconfig.generate_queue(spec.target.fingerprint())


def name_of(message: BatchMessage) -> str:
    """A batch's name in Redis."""
    return batch_name(message.segment, message.batch)


def read_claims(hints: Hints, run: str) -> Claims:
    """Who is spoken for. Read it before the commits: a batch leaves it only after its commit."""
    with translated_redis(hints.where):
        pending = cast("list[bytes]", hints.redis.zrange(hints.keys.pending(run), 0, -1))
        inflight = cast("list[bytes]", hints.redis.zrange(hints.keys.inflight(run), 0, -1))
    return Claims(frozenset(map(bytes.decode, pending)), frozenset(map(bytes.decode, inflight)))


def send_planned(ledger: Ledger, hints: Hints, queue: str, *, max_queued: int | None = None) -> int:
    """Offer every batch without a commit that nobody holds; return how many were sent.

    With `max_queued`, waits while that many messages are queued.
    """
    claims = read_claims(hints, ledger.run)
    ledger.refresh()
    if hints.num_queued(queue) == 0:
        # What is pending has lost its hint, unless it was received this very moment.
        claims = Claims(frozenset(), claims.inflight)
    wanted = (m for m in ledger.uncommitted() if not claims.holds(name_of(m)))
    num_sent = 0
    while chunk := list(islice(wanted, CHUNK_BATCHES)):
        while max_queued is not None and hints.num_queued(queue) >= max_queued:
            time.sleep(POLL_S)
        num_sent += hints.offer(chunk, queue)
    return num_sent
