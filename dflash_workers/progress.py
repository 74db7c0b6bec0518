"""How far a run is, from S3: the plan's log and the commits, each read once.

From <- plan and commits; to -> `progress.json`, written every few seconds by the one worker that
holds the lease `progress:<run>`, and -> `status`. `completed` never falls, whoever writes: what was
published is the floor. `done` is said only of a sealed plan whose every batch has a commit. What is
noted in Redis of batches that have none yet makes rate and ETA better, and nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import redis
import redis.exceptions
import redis.lock

from dflash_workers.contract.commit import committed_batches, read_commit
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.hints import translated_redis
from dflash_workers.contract.keys import RedisKeys, RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import Commit, Segment
from dflash_workers.contract.store import Store
from dflash_workers.throughput import WINDOW_S, Noted, Stretch, prompts_per_s, read_noted

LEASE_S = 15
RUNNING = "running"  # the status of a run with batches that have no commit
_NUM_READERS = 8


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


class Meter:
    """Measures one run again and again; what was read once is not read again."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._segments: set[str] = set()
        self._planned: set[tuple[int, str]] = set()
        self._committed: set[tuple[int, str]] = set()
        self._recent: list[Stretch] = []  # of the commits
        self.is_sealed = False
        self._started_at = 0.0
        self._finished_at = 0.0
        self._sum = Progress(0, 0, 0, 0.0, None, 0, 0, 0.0, 0.0, 0, 0, "waiting")

    def measure(self, noted: Sequence[Noted] = ()) -> Progress:
        """The run as it is now. Raises StoreUnavailable. `noted`: read from Redis before, so that
        what was committed since is not missed.
        """
        for key, _size in self._store.list(RunKeys(self._run).plan_log):
            if re.search(r"/\d+\.json$", key) and key not in self._segments:
                self._add_segment(key)
        present = committed_batches(self._store, self._run)
        new = [at for at in present if at not in self._committed]
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            for commit in readers.map(lambda at: read_commit(self._store, self._run, *at), new):
                self._add_commit(commit)
        open_batches = [batch for batch in noted if batch.at not in self._committed]
        return self._finish(open_batches, time.time())

    def _add_segment(self, key: str) -> None:
        segment = load(Segment, self._store.get(key))
        self._segments.add(key)
        self._planned |= {(segment.number, planned.batch) for planned in segment.batches}
        self.is_sealed |= segment.sealed
        sizes = [(planned.generation, len(planned.prompt_keys)) for planned in segment.batches]
        # A prompt that is planned again was counted before, as a rejected one.
        num_new = sum(size for generation, size in sizes if generation == 0)
        num_again = sum(size for generation, size in sizes if generation > 0)
        self._sum = replace(
            self._sum, total=self._sum.total + num_new, failed=self._sum.failed - num_again
        )

    def _add_commit(self, commit: Commit) -> None:
        self._committed.add((commit.segment, commit.batch))
        num_prompts = commit.num_rows + len(commit.rejected)
        self._recent.append(Stretch(num_prompts, commit.started_at, commit.finished_at))
        self._started_at = min(self._started_at or commit.started_at, commit.started_at)
        self._finished_at = max(self._finished_at, commit.finished_at)
        so_far = self._sum
        self._sum = replace(
            so_far,
            completed=so_far.completed + commit.num_rows,
            failed=so_far.failed + len(commit.rejected),
            total_input_tokens=so_far.total_input_tokens + commit.input_tokens,
            total_output_tokens=so_far.total_output_tokens + commit.output_tokens,
            s3_uploaded=so_far.s3_uploaded + 1,
            s3_bytes=so_far.s3_bytes + commit.data_bytes,
        )

    def _finish(self, noted: Sequence[Noted], now: float) -> Progress:
        is_idle = self._planned <= self._committed
        status = RUNNING if not is_idle else "done" if self.is_sealed else "waiting"
        elapsed_s = (self._finished_at if is_idle else now) - self._started_at
        elapsed_s = max(elapsed_s, 0.0) if self._started_at else 0.0
        rate = self._rate(noted, now)
        left = self._sum.total - self._sum.completed - self._sum.failed
        left -= sum(batch.num_prompts for batch in noted)
        return replace(
            self._sum,
            rate_per_sec=round(rate, 4),
            eta_hours=0.0 if left <= 0 else round(left / rate / 3600, 4) if rate else None,
            avg_output_tokens=round(self._sum.total_output_tokens / max(self._sum.completed, 1), 2),
            elapsed_hours=round(elapsed_s / 3600, 4),
            status=status,
        )

    def _rate(self, noted: Sequence[Noted], now: float) -> float:
        self._recent = [stretch for stretch in self._recent if stretch.to_s > now - WINDOW_S]
        held = [Stretch(b.num_prompts, b.since_s, now) for b in noted if b.since_s is not None]
        return prompts_per_s([*self._recent, *held], now)


def measure(store: Store, run: str) -> Progress:
    """The run as it is now, read afresh."""
    return Meter(store, run).measure()


class ProgressWriter:
    """Writes progress.json as long as nobody else does. Used from one thread."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, store: Store, run: str) -> None:
        self._client, self._keys, self._store, self._run = client, keys, store, run
        self._key = RunKeys(run).progress
        self._meter = Meter(store, run)
        # Taken by the thread that writes, let go by the one that ends the process.
        self._lease = redis.lock.Lock(
            client, keys.progress(run), timeout=LEASE_S, thread_local=False
        )

    def write(self) -> bool:
        """Measure and publish; False where another worker does."""
        if not self._is_mine():
            return False
        with translated_redis("journals"):
            noted = read_noted(self._client, self._keys, self._run)
        measured = self._meter.measure(noted)
        if not self._is_mine():  # measuring took longer than the lease
            return False
        floor = self._published_completed()
        self._store.replace(
            self._key, dump(replace(measured, completed=max(measured.completed, floor)))
        )
        return True

    def leave(self) -> None:
        """Let another worker write at once."""
        with translated_redis("progress lease"):
            if self._lease.owned():
                self._lease.release()

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
