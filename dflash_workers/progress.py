"""How far a run is, from S3: the plan's log and the commits, each read once.

From <- plan and commits; to -> `progress.json`, written every few seconds by the one process that
holds the lease `progress:<run>` (a worker, or the exporter), and -> `status`. `completed` never
falls, whoever writes: what was published is the floor. `done` is said only of a sealed plan whose
every batch has a commit. What is noted in Redis of batches that have none yet makes rate and ETA
better, and nothing else. Counting goes on where the last writer was: see counted.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import redis
import redis.exceptions
import redis.lock

from dflash_workers.contract.commit import read_commit
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.keys import RedisKeys, RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.store import Store
from dflash_workers.counted import Batches, Counted, read_counted, write_counted
from dflash_workers.roll import Roll
from dflash_workers.throughput import (
    Noted,
    Stretch,
    prompts_per_s,
    read_noted,
    spread_of_rates,
)

LEASE_S = 15
KEEP_EVERY_S = 15.0  # what was counted: who comes next reads at most the commits of so long
RUNNING = "running"  # the status of a run with batches that have no commit
_NUM_READERS = 8
_READ_AT_ONCE = 1000  # commits: takes less than the lease, even of a slow store


@dataclass(frozen=True, slots=True)
class Progress:
    """`progress.json`: these names are a contract."""

    total: int  # prompts planned
    completed: int
    failed: int  # rejected, with a reason
    rate_per_sec: float  # prompts that ended, over the last minutes
    eta_hours: float | None  # for what isn't noted even; None: nothing has moved lately
    total_input_tokens: int
    total_output_tokens: int
    avg_output_tokens: float  # per completed prompt
    elapsed_hours: float
    s3_uploaded: int  # data objects committed
    s3_bytes: int
    status: str  # waiting (nothing to do, plan open) | running | done


@dataclass(frozen=True, slots=True)
class Outlook:
    """What `progress.json` has no names for: how sure the end is, and how fast it all was."""

    eta_low_hours: float | None  # at the pace of the better minutes of the last ten
    eta_high_hours: float | None  # of the worse ones; None: in these nothing ended
    mean_rate_per_sec: float  # since the first claim


class Meter:
    """Measures one run again and again; what was read once is not read again."""

    def __init__(self, store: Store, run: str) -> None:
        """Goes on from what the run's last writer had counted."""
        self._store = store
        self._run = run
        self.counted: Counted = read_counted(store, run)
        self.num_unkept = 0  # commits counted here that nobody has kept the count of

    @property
    def is_sealed(self) -> bool:
        """Whether the plan is closed, as of the last look."""
        return self.counted.is_sealed

    def measure(self, noted: Sequence[Noted] = ()) -> Progress:
        """The run as it is now. Raises StoreUnavailable. `noted`: read from Redis before, so that
        what was committed since is not missed.
        """
        return self.measure_with_outlook(noted)[0]

    def measure_with_outlook(self, noted: Sequence[Noted] = ()) -> tuple[Progress, Outlook]:
        """`measure`, with how sure it is."""
        while not self.catch_up():
            pass
        now_s = time.time()
        self.counted.forget_before(now_s)
        return self._progress(self._still_open(noted), now_s)

    def catch_up(self) -> bool:
        """Count what is new, of commits a thousand at most; whether that was all of it."""
        for segment in read_segments(self._store, self._run, self.counted.next_segment):
            self.counted.add_segment(segment)
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            begun = self._begun(RunKeys(self._run).commits, self.counted.uncommitted)
            found = readers.map(self._newly_committed, begun)
            new = [at for batches in found for at in batches]
            some = new[:_READ_AT_ONCE]
            for commit in readers.map(lambda at: read_commit(self._store, self._run, *at), some):
                self.counted.add_commit(commit)
        self.num_unkept += len(some)
        return len(some) == len(new)

    def look_for_shards(self) -> None:
        """Count the commits that have a shard by now, or are in quarantine. Raises
        StoreUnavailable.
        """
        tokens = RunKeys(self._run).tokens
        for number, batches in self._names_by_segment(tokens):
            self.counted.add_tokenized(number, batches)
        for number, batches in self._names_by_segment(f"{tokens}quarantine/"):
            self.counted.num_quarantined += self.counted.add_tokenized(number, batches)

    def keep(self) -> None:
        """Write what is counted, for who counts next."""
        write_counted(self._store, self._run, self.counted)
        self.num_unkept = 0

    def _begun(self, prefix: str, batches: Batches) -> list[int]:
        """Of these segments those with anything below the prefix; the others need no listing."""
        there = set(self._store.folders(prefix)) if batches else set()
        return [int(number) for number in batches if f"{int(number):06d}" in there]

    def _names_by_segment(self, prefix: str) -> list[tuple[int, list[str]]]:
        """What there is of the segments that have commits without a shard."""
        begun = self._begun(prefix, self.counted.untokenized)
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            names = readers.map(self._names, [f"{prefix}{number:06d}/" for number in begun])
            return list(zip(begun, names, strict=True))

    def _newly_committed(self, segment: int) -> list[tuple[int, str]]:
        names = self._names(f"{RunKeys(self._run).commits}{segment:06d}/")
        waiting = self.counted.uncommitted[str(segment)]
        return [(segment, name) for name in names if name in waiting]

    def _names(self, prefix: str) -> list[str]:
        """The batches below a segment's prefix."""
        found = (re.search(r"/([^/]+)\.(?:json|arrow)$", k) for k, _ in self._store.list(prefix))
        return [match[1] for match in found if match]

    def _still_open(self, noted: Iterable[Noted]) -> list[Noted]:
        waiting = self.counted.uncommitted
        return [batch for batch in noted if batch.at[1] in waiting.get(str(batch.at[0]), {})]

    def _progress(self, noted: Sequence[Noted], now_s: float) -> tuple[Progress, Outlook]:
        so_far = self.counted
        is_idle = not so_far.uncommitted
        elapsed_s = (so_far.finished_s if is_idle else now_s) - so_far.started_s
        elapsed_s = max(elapsed_s, 0.0) if so_far.started_s else 0.0
        held = [Stretch(b.num_prompts, b.since_s, now_s) for b in noted if b.since_s is not None]
        stretches = [*so_far.recent, *held]
        rate = prompts_per_s(stretches, now_s)
        slow, fast = spread_of_rates(stretches, now_s)
        num_ended = so_far.completed + so_far.failed
        left = so_far.total - num_ended - sum(batch.num_prompts for batch in noted)
        progress = Progress(
            total=so_far.total,
            completed=so_far.completed,
            failed=so_far.failed,
            rate_per_sec=round(rate, 4),
            eta_hours=_hours(left, rate),
            total_input_tokens=so_far.input_tokens,
            total_output_tokens=so_far.output_tokens,
            avg_output_tokens=round(so_far.output_tokens / max(so_far.completed, 1), 2),
            elapsed_hours=round(elapsed_s / 3600, 4),
            s3_uploaded=so_far.num_commits,
            s3_bytes=so_far.data_bytes,
            status=RUNNING if not is_idle else "done" if so_far.is_sealed else "waiting",
        )
        return progress, Outlook(
            eta_low_hours=_hours(left, max(fast, rate)),
            eta_high_hours=_hours(left, min(slow, rate)),
            mean_rate_per_sec=round(num_ended / elapsed_s, 4) if elapsed_s else 0.0,
        )


def measure(store: Store, run: str) -> Progress:
    """The run as it is now."""
    return Meter(store, run).measure()


class ProgressWriter:
    """Writes progress.json as long as nobody else does. Used from one thread."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, store: Store, run: str) -> None:
        self._client, self._keys, self._store, self._run = client, keys, store, run
        self._key = RunKeys(run).progress
        self._meter: Meter | None = None  # made once this is the writer: it may read much
        self._was_writer = False
        self._kept_s = 0.0
        self._roll = Roll(client, keys)
        # Taken by the thread that writes, let go by the one that ends the process.
        self._lease = redis.lock.Lock(
            client, keys.progress(run), timeout=LEASE_S, thread_local=False
        )

    def write(self) -> bool:
        """Measure and publish; False where another process does."""
        with translated_redis("heartbeats"):
            self._roll.look()
        was_writer, self._was_writer = self._was_writer, self._is_mine()
        if not self._was_writer:
            return False
        meter = self._meter if was_writer and self._meter else self._newest()
        self._meter = meter
        while not meter.catch_up():  # once, where nobody has counted before
            meter.keep()
            if not self._is_mine():
                return False
        with translated_redis("journals"):
            noted = read_noted(self._client, self._keys, self._run)
        measured = meter.measure(noted)
        if not self._is_mine():  # measuring took longer than the lease
            return False
        floor = self._published_completed()
        self._store.replace(
            self._key, dump(replace(measured, completed=max(measured.completed, floor)))
        )
        self._keep(meter)
        return True

    def leave(self) -> None:
        """Let another process write at once."""
        with translated_redis("progress lease"):
            self._roll.leave()
            if self._lease.owned():
                self._lease.release()

    def _newest(self) -> Meter:
        """What another has kept meanwhile, or what is counted here, if that is more."""
        kept, own = Meter(self._store, self._run), self._meter
        return own if own and own.counted.num_commits > kept.counted.num_commits else kept

    def _keep(self, meter: Meter) -> None:
        if time.monotonic() - self._kept_s >= KEEP_EVERY_S:
            meter.look_for_shards()
            meter.keep()
            self._kept_s = time.monotonic()

    def _is_mine(self) -> bool:
        try:
            with translated_redis("progress lease"):
                if self._lease.owned():
                    return bool(self._lease.reacquire())
                return bool(self._lease.acquire(blocking=False))
        except redis.exceptions.LockError:  # lapsed between the two
            return False

    def _published_completed(self) -> int:
        try:
            return load(Progress, self._store.get(self._key)).completed
        except (Missing, Corrupt):
            return 0


def _hours(left: float, rate: float) -> float | None:
    """For so many prompts; None where none ends."""
    if left <= 0:
        return 0.0
    return round(left / rate / 3600, 4) if rate > 0 else None
