"""Who works on which batch: claim, renew, release, reap, clear; claims.lua holds the rules.

Called by tasks (claim), holds (renew), generate (release, clear) and the reaper. A message is a
hint; the claim is what counts, by Redis' own clock. Handing a batch over takes three steps, for
release and reap alike: a new deadline, the hint, and inflight -> pending only if that deadline
still stands. A claim in between keeps the batch; a crash in between is mended when the deadline is
over. Clearing comes after a commit or a cancel and leaves another holder's lease (see claims.lua).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any

import redis
import uuid_utils

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import (
    LEASE_MS,
    REAP_DEADLINE_MS,
    RedisKeys,
    batch_name,
    parse_batch_name,
)
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import BatchMessage

_SCRIPT = resources.files("dflash_workers").joinpath("claims.lua").read_text(encoding="utf-8")
_MAX_REAPED = 50  # batches a sweep: all are handed over before their new deadline is over


@dataclass(frozen=True, slots=True)
class Timing:
    """How long claims last; tests scale it down."""

    lease_ms: int = LEASE_MS
    handover_ms: int = REAP_DEADLINE_MS  # from a hand-over's first step to its last
    reap_every_s: float = 2.0  # at the latest: a sweep comes when the next deadline is over

    @property
    def renew_every_s(self) -> float:
        return self.lease_ms / 4000


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch, and the attempt that works or worked on it."""

    message: BatchMessage
    attempt: str  # UUIDv7, made at the claim

    @property
    def name(self) -> str:
        return batch_name(self.message.segment, self.message.batch)


class Renewal(Enum):
    """What a renewal found."""

    HELD = "held"
    AGAIN = "again"  # had lapsed or been cleared: claimed anew, all that follows a claim is due
    LOST = "lost"  # another's


class Claims:
    """The claims of one Redis. Safe to share between threads; every method may be repeated."""

    def __init__(self, client: redis.Redis, hints: Hints, timing: Timing) -> None:
        self.timing = timing
        self._client = client
        self._hints = hints
        self._script = client.register_script(_SCRIPT)

    def claim(self, message: BatchMessage) -> Claim | None:
        """Take the batch; None where another holds it."""
        claim = Claim(message, str(uuid_utils.uuid7()))
        answer = self._call(message.run, "claim", claim.name, claim.attempt, self.timing.lease_ms)
        return claim if answer == b"held" else None

    def renew(self, claim: Claim) -> Renewal:
        """Extend lease and deadline."""
        run, attempt = claim.message.run, claim.attempt
        answer = self._call(run, "renew", claim.name, attempt, self.timing.lease_ms)
        return Renewal(str(answer, "ascii"))

    def release(self, claim: Claim, queue: str) -> bool:
        """Hand the batch over, first in line; False, and nothing done, if it is not held."""
        run, attempt = claim.message.run, claim.attempt
        deadline_ms = self._call(run, "release", claim.name, attempt, self.timing.handover_ms)
        if deadline_ms:
            self._hand_over(claim.message, deadline_ms, queue)
        return bool(deadline_ms)

    def reap(self, run: str, queue: str) -> list[str]:
        """Hand over the batches that nobody has renewed in time; return their names."""
        limit, handover_ms = _MAX_REAPED, self.timing.handover_ms
        deadline_ms, *names = self._call(run, "reap", "", limit, handover_ms)
        for name in names:
            segment, batch = parse_batch_name(name.decode())
            self._hand_over(BatchMessage(run, segment, batch), deadline_ms, queue)
        return [name.decode() for name in names]

    def due_in_s(self, run: str) -> float:
        """How long it is until the run's next deadline is over; infinite with nothing in flight.

        Renewals move deadlines on, so what is due then may be nothing.
        """
        with translated_redis(self._hints.where), self._client.pipeline(transaction=False) as pipe:
            pipe.zrange(self._hints.keys.inflight(run), 0, 0, withscores=True)
            pipe.time()
            entries, (seconds, microseconds) = pipe.execute()
        if not entries:
            return math.inf
        ((_name, deadline_ms),) = entries
        now_ms = seconds * 1000 + microseconds / 1000
        return float(deadline_ms - now_ms) / 1000

    def clear(self, claim: Claim) -> None:
        """Forget a batch that has its commit or is cancelled: claim, hints' memory, notes."""
        self._call(claim.message.run, "clear", claim.name, claim.attempt)

    def _hand_over(self, message: BatchMessage, deadline_ms: int, queue: str) -> None:
        self._hints.give_back(message, queue)
        name = batch_name(message.segment, message.batch)
        self._call(message.run, "settle", name, deadline_ms)

    def _call(self, run: str, verb: str, name: str, *args: str | int) -> Any:
        keys = _keys_of(self._hints.keys, run, name)
        with translated_redis(self._hints.where):
            return self._script(keys=keys, args=[verb, name, *args])


def _keys_of(keys: RedisKeys, run: str, name: str) -> list[str]:
    """The keys of claims.lua, in its order."""
    of_run = [keys.pending(run), keys.inflight(run)]
    of_batch = [keys.lease(run, name), keys.journal(run, name), keys.suspects(run, name)]
    return of_run + of_batch
