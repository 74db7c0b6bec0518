"""Batches that Redis has forgotten -> hints again.

Reads plan and commits through <- ledger.py (the truth) and claims and queue from Redis (the hints);
offers what is missing -> workers. A batch between two states can look missing for a moment, so
nothing is sent on one look: it takes two, at least one lease apart. Flush Redis at any moment, and
exactly the batches without a commit come back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import LEASE_MS, parse_batch_name
from dflash_workers.contract.records import BatchMessage
from producer.enqueue import Claims, name_of, read_claims
from producer.ledger import Ledger

LEASE_S = LEASE_MS / 1000


@dataclass(frozen=True, slots=True)
class View:
    """One look at everything."""

    at_s: float  # monotonic
    uncommitted: frozenset[str]
    claims: Claims
    num_queued: int


@dataclass(frozen=True, slots=True)
class Suspects:
    """What one look gave reason to suspect; a second one convicts."""

    at_s: float
    missing: frozenset[str]  # no commit, no claim, no hint on its way
    unheard: frozenset[str]  # waiting to be claimed, while the queue is empty


def suspects_of(view: View) -> Suspects:
    """The batches that may have lost their hint."""
    return Suspects(
        at_s=view.at_s,
        missing=view.uncommitted - view.claims.pending - view.claims.inflight,
        unheard=view.claims.pending if view.num_queued == 0 else frozenset(),
    )


def decide(before: Suspects, now: Suspects) -> frozenset[str]:
    """The batches to offer again: suspected in the same way twice, at least one lease apart."""
    if now.at_s - before.at_s < LEASE_S:
        return frozenset()
    return (before.missing & now.missing) | (before.unheard & now.unheard)


@dataclass(slots=True)
class Reconciler:
    """Looks and sends, as often as it is called."""

    ledger: Ledger
    hints: Hints
    queue: str
    before: Suspects | None = None

    def look(self) -> int:
        """One look; return how many batches were offered again. Too early a look is no look."""
        now_s = time.monotonic()
        if self.before and now_s - self.before.at_s < LEASE_S:
            return 0
        claims = read_claims(self.hints, self.ledger.run)
        num_queued = self.hints.num_queued(self.queue)
        self.ledger.refresh()
        uncommitted = frozenset(map(name_of, self.ledger.uncommitted()))
        now = suspects_of(View(now_s, uncommitted, claims, num_queued))
        again = decide(self.before, now) if self.before else frozenset()
        self.before = now
        batches = sorted(map(parse_batch_name, again))
        return self.hints.offer(
            [BatchMessage(self.ledger.run, *batch) for batch in batches], self.queue
        )
