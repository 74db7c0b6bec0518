"""The worker's sweep: bring back what dead workers held, say that this one lives, notice if not.

One thread of the worker's calls `sweep` every few seconds, and as soon as a claim's deadline is
over. Each step has a time limit of its own in Redis, so that one that hangs delays the next sweep
by seconds. The heartbeat is the hash `worker:<slot>`, in which status, people and an autoscaler see
what runs though no message waits. Two processes of one slot share it and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import dataclass, field

from dflash_workers import watchdog
from dflash_workers.contract.keys import WORKER_S
from dflash_workers.contract.queues import translated_redis
from dflash_workers.goodbye import Goodbye
from dflash_workers.heirs import Heirs
from dflash_workers.watchdog import Verdict, View, Watchdog
from dflash_workers.worksite import DEAD, FOREIGN, RECEIVED, UNREADABLE, Site

log = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0
_OVER_S = 0.02  # after a deadline, when it is over by any rounding


@dataclass(frozen=True, slots=True)
class Limits:
    """When a sweep draws consequences."""

    idle_exit_s: float = 0.0  # leave after so long without work; 0: never
    watchdog: watchdog.Limits = field(default_factory=watchdog.Limits)


class Vitals:
    """One process'."""

    def __init__(self, site: Site, goodbye: Goodbye, limits: Limits) -> None:
        # Of Celery's consumer, once it is ready.
        self.consumer: watchdog.Consumer | None = None
        self.num_slots = 0  # messages at once
        self.heirs: Heirs | None = None
        self._site = site
        self._goodbye = goodbye
        self._limits = limits
        self._watchdog = Watchdog(time.monotonic(), limits.watchdog)
        self._started_s = self._busy_s = time.monotonic()
        self._reported = (time.monotonic(), site.engine.num_tokens)  # when, and tokens until then
        self._process = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"  # tells it from others of its slot
        self._has_beaten = self._has_twin = False

    def sweep(self) -> float:
        """One sweep; how long until the next is due, in seconds, if nothing moves on until then.

        Raises QueueUnavailable, with the watchdog having looked all the same.
        """
        num_queued: int | None = None
        try:
            with self._site.gate.recording("redis"):
                self._reap()
                num_queued = self._site.hints.num_queued(self._site.queue)
                self._beat(num_queued)
        finally:
            self._look(num_queued)
        # Redis answers: what journals keep is written now, by who holds the batch.
        self._site.holds.look_again(self._site.journals.take_paused())
        self._leave_if_idle(num_queued)
        due_s = min(map(self._site.claims.due_in_s, self._site.runs))
        return max(due_s, 0.0) + _OVER_S

    def leave(self) -> None:
        """Take the heartbeat away, after the last task; a twin's stays."""
        client, key = self._site.hints.redis, self._site.hints.keys.worker(self._site.slot)
        with translated_redis(self._site.hints.where):
            if client.hget(key, "process") == self._process.encode():
                client.delete(key)

    def _reap(self) -> None:
        for run in self._site.runs:
            for name in self._site.claims.reap(run, self._site.queue):
                log.info("%s: its holder is gone, given back", name)
                if self.heirs:
                    self.heirs.take_up(run, name)

    def _beat(self, num_queued: int) -> None:
        """The heartbeat, and a line a minute."""
        site = self._site
        since_s, tokens = self._reported
        seconds = time.monotonic() - since_s
        facts = {
            "state": self._state(),
            "batches": f"{len(site.holds)}",
            "in_flight": f"{site.engine.num_running}",
            # Since this process' start, all three: who compares two heartbeats has a rate.
            "uptime_s": f"{time.monotonic() - self._started_s:.3f}",
            "tokens": f"{site.engine.num_tokens}",
            "replies": f"{site.engine.num_replies}",
            "tokens_per_s": f"{(site.engine.num_tokens - tokens) / max(seconds, 1e-3):.1f}",
            "dropped": f"{site.runs.num_dropped}",  # hints of paused and cancelled runs
            **{name: f"{site.tally[name]}" for name in (FOREIGN, UNREADABLE, DEAD)},
        }
        items = [text for fact in facts.items() for text in fact]
        key = site.hints.keys.worker(site.slot)
        with translated_redis(site.hints.where), site.hints.redis.pipeline() as transaction:
            transaction.hget(key, "process")
            transaction.hset(key, items=["process", self._process, *items])
            transaction.expire(key, WORKER_S)
            last_process, *_ = transaction.execute()
        self._note_twin(last_process)
        if seconds > REPORT_EVERY_S:
            self._reported = (time.monotonic(), site.engine.num_tokens)
            log.info("%s, %d queued", ", ".join(f"{k} {v}" for k, v in facts.items()), num_queued)

    def _note_twin(self, last_process: bytes | None) -> None:
        """Somebody who beats after us is alive; before our first beat it may be who died here."""
        is_others = last_process not in (None, self._process.encode())
        if self._has_beaten and is_others and not self._has_twin:
            self._has_twin = True
            log.warning(
                "another process is worker %r too: no batch suffers, but status shows one of the "
                "two at a time; start each with a slot of its own",
                self._site.slot,
            )
        self._has_beaten = True

    def _state(self) -> str:
        if self._site.holds.draining.is_set():
            return "draining"
        why = self._site.gate.why_closed()
        return f"paused: {why}" if why else "up"

    def _look(self, num_queued: int | None) -> None:
        """The watchdog's verdict, and what follows from it."""
        site = self._site
        is_taking = not site.holds.draining.is_set() and not site.gate.why_closed()
        view = View(
            num_queued=num_queued,
            wants_more=is_taking and site.tally.num_busy < self.num_slots,
            num_received=site.tally[RECEIVED],
            num_running=site.engine.num_running,
            num_replies=site.engine.num_replies,
            num_tokens=site.engine.num_tokens,
        )
        verdict = self._watchdog.look(view, time.monotonic())
        if verdict is Verdict.RECONNECT and self.consumer:
            log.warning("messages wait and none comes: connecting anew")
            watchdog.reconnect(self.consumer)
        elif verdict is Verdict.EXIT:
            self._goodbye.ask("messages wait and none comes, connected anew or not", exit_code=1)
        elif verdict is Verdict.ENGINE_STUCK:
            evidence = "requests run, and the engine gives neither a token nor a reply"
            asyncio.run_coroutine_threadsafe(site.gate.note_stuck(evidence), site.loop)

    def _leave_if_idle(self, num_queued: int | None) -> None:
        if num_queued or len(self._site.holds):
            self._busy_s = time.monotonic()
        idle_s = time.monotonic() - self._busy_s
        if 0 < self._limits.idle_exit_s < idle_s:
            self._goodbye.ask(f"no work for {idle_s:.0f} s")
