"""Every process of a campaign, looked at every few seconds: memory, CPU time, threads.

And whatever else has a number (Redis' memory, requests that run): a gauge.

Used in a `with` by the campaign's program, which names each process that it starts; what was seen
goes into result.py's series, processes and stages. Invariant: a trace keeps a bounded number of
points, however long it runs; full, it halves its resolution. A process that is started anew under
its name is another one, because memory grows within one life alone.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression

import psutil
import redis

from benchmarks.campaign.result import ENDS_EARLY, KINDS, ProcessSeen, Series, Stage
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.queues import translated_redis

MB = 1e6
CAPACITY = 512  # points of a trace: more can't be told apart in a picture
SETTLED_FROM = 0.2  # of the time: before that, a process grows to its working size
_MIN_POINTS = 8  # a line through fewer says nothing
_MIN_S = 60.0  # and so does one through less time


class Trace:
    """Samples over time, no more than `capacity` (even) of them, evenly spread."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.at_s, self.values = array("d"), array("d")
        self.peak = 0.0  # of all that was ever added
        self._capacity = capacity
        self._every = 1  # one sample in so many is kept
        self._num_added = 0

    def add(self, at_s: float, value: float) -> None:
        """A later sample than the one before."""
        self.peak = max(self.peak, value)
        if self._num_added % self._every == 0:
            self.at_s.append(at_s)
            self.values.append(value)
        self._num_added += 1
        if len(self.at_s) == self._capacity:
            self.at_s, self.values = self.at_s[::2], self.values[::2]
            self._every *= 2

    def series(self, name: str, unit: str, zero_s: float) -> Series:
        """With its times counted from `zero_s` on."""
        times_s = [round(at_s - zero_s, 2) for at_s in self.at_s]
        return Series(name, unit, times_s, [round(value, 3) for value in self.values])


def slope_per_min(at_s: Sequence[float], values: Sequence[float]) -> float | None:
    """What is added a minute, by least squares over the time after SETTLED_FROM; None with too few
    points or too little time for a line.
    """
    if not at_s or at_s[-1] - at_s[0] < _MIN_S:
        return None
    from_s = at_s[0] + SETTLED_FROM * (at_s[-1] - at_s[0])
    settled = [(t, v) for t, v in zip(at_s, values, strict=True) if t >= from_s]
    if len(settled) < _MIN_POINTS:
        return None
    return 60 * linear_regression(*zip(*settled, strict=True)).slope


class Watched:
    """One process from its start to its end."""

    def __init__(self, name: str, kind: str, pid: int) -> None:
        self.name, self.kind, self.pid = name, kind, pid
        self.rss_mb, self.num_threads = Trace(), Trace()
        self.cpu_s = 0.0  # user and system; what it used after the last look isn't known
        self._process: psutil.Process | None
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def look(self, at_s: float) -> None:
        """One sample, as long as it lives."""
        if self._process is None:
            return
        try:
            with self._process.oneshot():
                times = self._process.cpu_times()
                rss_mb = self._process.memory_info().rss / MB
                num_threads = self._process.num_threads()
        except psutil.NoSuchProcess:
            self._process = None
            return
        self.cpu_s = times.user + times.system
        if rss_mb:  # one that has ended, and that nobody has waited for yet, has none
            self.rss_mb.add(at_s, rss_mb)
            self.num_threads.add(at_s, num_threads)

    def slope_mb_per_min(self) -> float | None:
        """How its memory grows once it has settled."""
        return slope_per_min(self.rss_mb.at_s, self.rss_mb.values)

    def seen(self, zero_s: float) -> ProcessSeen:
        """For the result."""
        rss = self.rss_mb.series(self.name, "MB", zero_s)
        slope = self.slope_mb_per_min()
        return ProcessSeen(self.name, self.kind, self.pid, round(self.cpu_s, 2), rss, slope)


@dataclass(frozen=True, slots=True)
class Gauge:
    """Any number that is looked up with each sample."""

    name: str
    unit: str
    read: Callable[[], float | None]  # None: nobody knows now
    trace: Trace = field(default_factory=Trace)


class Watch:
    """Samples, taken by a thread of its own within a `with`."""

    def __init__(self, every_s: float = 2.0) -> None:
        self.watched: list[Watched] = []
        self.gauges: dict[str, Gauge] = {}
        self.zero_s = time.monotonic()  # what all times are counted from, unless moved
        self._every_s = every_s
        self._cpu = {kind: Trace() for kind in KINDS}
        self._begun: tuple[dict[str, float], int] | None = None  # CPU by kind, and prompts done
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def process(self, name: str, kind: str, pid: int) -> None:
        """Watch it from now on. `kind`: one of result.KINDS, the stage its CPU time counts to."""
        with self._lock:
            self.watched.append(Watched(name, kind, pid))
            self.watched[-1].look(time.monotonic())

    def gauge(self, name: str, unit: str, read: Callable[[], float | None]) -> None:
        """Ask for this number with each sample, in the watch's thread."""
        with self._lock:
            self.gauges[name] = Gauge(name, unit, read)

    def look(self) -> None:
        """At every process. Called with each sample; again by whoever is about to end one, since
        what that used after the last look is lost.
        """
        with self._lock:
            self._look(time.monotonic())

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds so far, by kind, of those that have any process."""
        sums: dict[str, float] = {}
        for one in self.watched:
            sums[one.kind] = sums.get(one.kind, 0.0) + one.cpu_s
        return sums

    def processes(self) -> list[ProcessSeen]:
        """In the order of their starts."""
        return [one.seen(self.zero_s) for one in self.watched]

    def series(self) -> list[Series]:
        """The gauges, then the CPU time of each kind so far ("cpu.worker", in seconds)."""
        gauges = [g.trace.series(g.name, g.unit, self.zero_s) for g in self.gauges.values()]
        cpu = {f"cpu.{kind}": trace for kind, trace in self._cpu.items() if trace.peak}
        return gauges + [trace.series(name, "s", self.zero_s) for name, trace in cpu.items()]

    def begin(self, num_done: int) -> None:
        """Who works on prompts is warm, and so many are done. Only the first call counts."""
        if self._begun is None:
            self.look()
            self._begun = (self.cpu_s(), num_done)

    def stages(self, num_prompts: int) -> list[Stage]:
        """What each kind cost in all, and a prompt: since `begin`, where it was at work then."""
        before, num_done = self._begun or ({}, 0)
        stages = []
        for kind, cpu_s in self.cpu_s().items():
            is_over = kind in ENDS_EARLY
            since_s = cpu_s - (0.0 if is_over else before.get(kind, 0.0))
            count = num_prompts - (0 if is_over else num_done)
            peak_mb = max(one.rss_mb.peak for one in self.watched if one.kind == kind)
            stages.append(Stage(kind, round(cpu_s, 2), 1000 * since_s / max(count, 1), peak_mb))
        return stages

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            gauges = list(self.gauges.values())
            now_s = time.monotonic()
            self._look(now_s)
            cpu_s = self.cpu_s()
            for kind, trace in self._cpu.items():  # all at the same times, to be added up
                trace.add(now_s, cpu_s.get(kind, 0.0))
        for gauge in gauges:  # may take as long as a network does
            if (value := gauge.read()) is not None:
                with self._lock:
                    gauge.trace.add(time.monotonic(), value)

    def _look(self, now_s: float) -> None:
        for one in self.watched:
            one.look(now_s)


def worst_slope(processes: Iterable[ProcessSeen]) -> ProcessSeen | None:
    """The process whose memory grows fastest; None where none lived for long enough."""
    known = [(one.slope_mb_per_min, one) for one in processes if one.slope_mb_per_min is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def redis_memory_mb(client: redis.Redis, where: str) -> float | None:
    """What Redis' data take there; None while it is away."""
    try:
        with translated_redis(where):
            return float(client.info("memory")["used_memory"]) / MB
    except QueueUnavailable:
        return None
