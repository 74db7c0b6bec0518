"""What a node's engines are to draft with: the run's serving log, read and carried out.

Looked at by -> machine; each lane has its Drafting, which its engine's program (lane.py) asks at
every start and while it serves. An engine is changed so: its worker hands its batches on, the
engine is stopped and started with the other drafter, the worker starts again; one engine of a run
at a time, by a turn in Redis. Invariants: a drafter that an engine can't serve twice in a row is
left out there and said so, and the engine goes back to what the fleet serves; a trial whose
promoter's lease is gone for a minute is over, whatever the log says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import redis
from redis.exceptions import LockError

from dflash_workers.contract.errors import FleetError, Transient
from dflash_workers.contract.keys import TURN_S, WORKER_S, RedisKeys
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.serving import NONE, ServingEntry, ServingLog
from dflash_workers.promotion.observing import LEFT_OUT
from dflash_workers.server import EngineConfig

log = logging.getLogger(__name__)

WHERE = "Redis"
LOOK_EVERY_S = 5.0
ORPHAN_S = 60.0  # a trial without a promoter
MAX_TRIES = 2  # of a drafter in one engine
RETRY_S = 60.0
STEADY_S = 600.0  # an engine that dies after so long didn't die of its drafter


@dataclass
class Drafting:
    """One engine's drafter: what it shall serve, what it serves, what it could not."""

    engine_with: Callable[[str], EngineConfig]  # stages the drafter; raises FleetErrors
    take_turn: Callable[[], bool]
    serving: str = NONE  # what its process was started with
    is_ready: bool = False
    why_not: dict[str, str] = field(default_factory=dict)
    entry: int = -1  # of the log, that was heeded last
    _wanted: str = NONE
    _or_else: str = NONE
    _configs: dict[str, EngineConfig] = field(default_factory=dict)  # of drafters staged here
    _retry_s: float = 0.0  # when one that S3 did not give is asked for again
    _num_failures: Counter[str] = field(default_factory=Counter)
    _started_s: float | None = None  # None: not yet, or stopped to be changed

    def want(self, drafter: str, *, or_else: str, entry: int) -> None:
        """What the log says: this, and where it can't be served, what the fleet serves. An entry
        that names a drafter anew gives it another chance."""
        if entry != self.entry:
            self.why_not.pop(drafter, None)
            self._num_failures.pop(drafter, None)
            self.entry = entry
        self._wanted, self._or_else = drafter, or_else

    def next_config(self) -> EngineConfig:
        """For an engine about to start. After one that wasn't stopped by us, that is a failure of
        what it drafted with."""
        self._note_end()
        self.is_ready, self._started_s = False, time.monotonic()
        fit = [d for d in (self._wanted, self._or_else) if d not in self.why_not and self._stage(d)]
        self.serving = fit[0] if fit else NONE
        return self._configs.get(self.serving) or self.engine_with(NONE)

    def note_ready(self) -> None:
        """The engine answers."""
        self.is_ready = True

    def is_outdated(self) -> bool:
        """Whether the engine shall be changed, what it shall serve is here, and its turn is."""
        fit = (d for d in (self._wanted, self._or_else) if d not in self.why_not)
        choice = next(fit, NONE)
        if choice == self.serving or time.monotonic() < self._retry_s:
            return False
        return self._stage(choice) and self.take_turn()

    def note_stopped(self) -> None:
        """It is stopped to be changed: that is nobody's failure."""
        self._started_s, self.is_ready = None, False

    def _stage(self, drafter: str) -> bool:
        """Have it on this machine. What S3 doesn't give now is asked for again, later."""
        if drafter == NONE or drafter in self._configs:
            return True
        try:
            self._configs[drafter] = self.engine_with(drafter)
        except Transient as error:
            log.warning("%s is not here yet: %s", drafter, error)
            self._retry_s = time.monotonic() + RETRY_S
        except FleetError as error:
            self._leave_out(drafter, str(error).splitlines()[0])
        return drafter in self._configs

    def _note_end(self) -> None:
        if self._started_s is None or self.serving == NONE:
            return
        if time.monotonic() - self._started_s > STEADY_S:
            self._num_failures.pop(self.serving, None)
            return
        self._num_failures[self.serving] += 1
        if self._num_failures[self.serving] >= MAX_TRIES:
            self._leave_out(self.serving, f"its engine ended {MAX_TRIES} times")

    def _leave_out(self, drafter: str, why: str) -> None:
        log.error("%s is left out here: %s", drafter, why)
        self.why_not[drafter] = why


class Follower:
    """Of one node. `look` belongs to its main thread."""

    def __init__(self, serving: ServingLog, client: redis.Redis, keys: RedisKeys, run: str) -> None:
        self._serving = serving
        self._client = client
        self._keys = keys
        self._run = run
        self._draftings: dict[str, Drafting] = {}
        self._looked_s = -LOOK_EVERY_S
        self._promoted_s = time.monotonic()  # when a promoter was seen last
        self._turn = client.lock(keys.turn(run), timeout=TURN_S, blocking=False, thread_local=False)
        self._whose = ""  # turn it is, among our slots
        self._taking = threading.Lock()

    def add(self, slot: str, engine_with: Callable[[str], EngineConfig]) -> Drafting:
        """A lane that follows; before the first look."""
        drafting = Drafting(engine_with, lambda: self._take_turn(slot))
        self._draftings[slot] = drafting
        return drafting

    def look(self) -> None:
        """What is wanted now, and what is served. Raises FleetErrors where Redis or S3 are away."""
        if self._draftings and time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            entry = self._serving.last()
            with translated_redis(WHERE):
                self._tend_turn()
                is_orphaned = self._is_orphaned(entry)
                for slot, drafting in self._draftings.items():
                    wanted = entry.drafter if is_orphaned else entry.wanted(slot)
                    drafting.want(wanted, or_else=entry.drafter, entry=entry.number)
                    self._report(slot, drafting)

    def _is_orphaned(self, entry: ServingEntry) -> bool:
        if entry.trial is None or self._client.exists(self._keys.promoter(self._run)):
            self._promoted_s = time.monotonic()
        return time.monotonic() - self._promoted_s > ORPHAN_S

    def _report(self, slot: str, drafting: Drafting) -> None:
        facts = {
            "run": self._run,
            "drafter": drafting.serving,
            "ready": str(int(drafting.is_ready)),
            "entry": str(drafting.entry),
            **{f"{LEFT_OUT}{drafter}": why for drafter, why in drafting.why_not.items()},
        }
        items = [text for fact in facts.items() for text in fact]
        key = self._keys.serves(slot)
        with self._client.pipeline() as transaction:
            transaction.delete(key)
            transaction.hset(key, items=items)
            transaction.expire(key, WORKER_S)
            transaction.execute()

    def _take_turn(self, slot: str) -> bool:
        """Called from the lane's thread. Redis away: nobody's turn."""
        try:
            with self._taking, translated_redis(WHERE):
                if not self._whose and self._turn.acquire():
                    self._whose = slot
                return self._whose == slot
        except FleetError:
            return False

    def _tend_turn(self) -> None:
        """Keep it while our engine changes, then let another have it."""
        with self._taking, suppress(LockError):  # a lapsed one is nobody's loss
            if not self._whose:
                return
            if not self._draftings[self._whose].is_ready:
                self._turn.reacquire()
                return
            self._whose = ""
            self._turn.release()
