"""What a campaign sees of its fleet while it runs, and says of it: how full, how far, until when.

Made by __main__.py: puts its numbers into the watch, whose thread asks for them with each sample,
and keeps of each what the figures need. Everything here is read past the proxies; what can't be
had for a moment (Redis was killed) is left out of the series.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.campaign.fleet import Fleet
from benchmarks.campaign.watching import redis_memory_mb
from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.progress import Progress
from producer.api import Run
from producer.enqueue import queue_of

ETA_FROM = 0.02  # of the prompts
BUSY_QUEUE = 1  # hints in the queue: while there are so many, every engine could be full


@dataclass(slots=True)
class Eta:
    """What the run itself said of its end, once the plan was whole and ETA_FROM of it was done."""

    at_s: float  # from the first worker's start
    end_s: float  # the end that it foretold


@dataclass
class Views:
    """Asked by the watch's thread; read by the course's."""

    fleet: Fleet
    run: Run
    num_planned: Callable[[], int | None]  # None: planning still goes on
    zero_s: float = field(default_factory=time.monotonic)
    num_queued: int = 0
    num_running: int = 0
    num_answers: int = 0
    num_done: int = 0  # prompts, as progress.json says
    redis_mb: float = 0.0
    peak_redis_mb: float = 0.0
    fills: dict[int, float] = field(default_factory=dict)  # by engine, while the queue was busy
    eta: Eta | None = None
    _queue: str = ""
    _last: tuple[float, int] = (0.0, 0)
    _finished: dict[int, int] = field(default_factory=dict)  # by engine, since its start

    def __post_init__(self) -> None:
        self._queue = queue_of(self.run.spec)
        watch = self.fleet.watch
        watch.gauge("queued", "batches", self._ask_queue)
        watch.gauge("running", "requests", self._ask_engines)
        watch.gauge("answers", "requests", lambda: self.num_answers)
        watch.gauge("prompts", "prompts", self._ask_progress)
        watch.gauge("redis", "MB", self._ask_redis)

    def line(self, num_prompts: int) -> str:
        """For people, how it stands now."""
        now_s = time.monotonic()
        since_s, before = self._last
        rate = (self.num_answers - before) / max(now_s - since_s, 1e-9)
        self._last = (now_s, self.num_answers)
        fill = sum(self.fills.values()) / len(self.fills) if self.fills else 0.0
        return (
            f"{self.num_done}/{num_prompts} prompts committed, {self.num_answers} answers, "
            f"{rate:.1f}/s, {self.num_running} running, {self.num_queued} batches queued, "
            f"fill {fill:.3f}, Redis {self.redis_mb:.1f} MB"
        )

    def _ask_queue(self) -> float | None:
        try:
            self.num_queued = self.run.hints.num_queued(self._queue)
        except FleetError:
            return None
        return self.num_queued

    def _ask_engines(self) -> float | None:
        limit = self.fleet.configuration.workers.in_flight
        num_running = 0
        for number in range(len(self.fleet.slots)):
            seen = self.fleet.engines.occupancy(number)
            if seen is None:
                return None
            num_running += seen["num_running"]
            self._count_answers(number, int(seen["num_finished"]))
            seconds = seen["at_s"] - seen["first_s"]
            if self.num_queued >= BUSY_QUEUE and seen["first_s"] and seconds > 0:
                self.fills[number] = seen["slot_seconds"] / seconds / limit
        self.num_running = num_running
        return num_running

    def _count_answers(self, number: int, num_finished: int) -> None:
        """An engine that died counts from nothing again."""
        before = self._finished.get(number, 0)
        self.num_answers += num_finished - before if num_finished >= before else num_finished
        self._finished[number] = num_finished

    def _ask_progress(self) -> float | None:
        try:
            told = load(Progress, self.run.store.get(RunKeys(self.run.spec.run).progress))
        except FleetError:
            return None
        self.num_done = told.completed + told.failed
        is_whole = told.total == self.num_planned()
        if self.eta is None and is_whole and self.num_done >= ETA_FROM * told.total:
            self._take_eta(told)
        return self.num_done

    def _take_eta(self, told: Progress) -> None:
        if told.eta_hours is not None and told.status == "running":
            at_s = time.monotonic() - self.zero_s
            self.eta = Eta(at_s, at_s + 3600 * told.eta_hours)

    def _ask_redis(self) -> float | None:
        found = redis_memory_mb(self.run.hints.redis, self.run.hints.where)
        self.redis_mb = found or self.redis_mb
        self.peak_redis_mb = max(self.peak_redis_mb, self.redis_mb)
        return found
