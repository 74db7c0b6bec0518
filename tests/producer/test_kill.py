"""The command, killed on its way again and again, against one that nobody disturbed."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson
import psutil
import pytest

from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments, read_spec
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from producer.enqueue import queue_of
from tests.producer.conftest import RowsFile

ROOT = Path(__file__).parents[2]
NUM_KILLS = 20
NUM_ROWS = 9_000  # enough for several processes to read them, and for three segments
RUN = "killed"
# The verb without the other packages' verbs, which take longer to load than it takes to run.
VERB = "from producer.cli.enqueue import app; app()"
FLAGS = ("--json", "--batch-size=3", "--samples=2", "--heldout=0.2")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a campaign leaves its traces."""

    settings: Settings
    store: Store
    hints: Hints

    def start(self, rows: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", VERB, str(rows), *FLAGS],
            stdout=subprocess.PIPE,
            env=os.environ | self.settings.environment(),
            cwd=ROOT,
        )

    def finish(self, rows: Path) -> Json:
        with self.start(rows) as process:
            output, _ = process.communicate()
        assert process.returncode == 3  # some rows are refused
        report: Json = orjson.loads(output)
        return report

    def num_traces(self) -> int:
        """What grows from a call's first write to its last hint."""
        num_segments = sum(1 for _ in self.store.list(RunKeys(RUN).plan_log))
        num_prompts = sum(1 for _ in self.store.list(RunKeys(RUN).all_prompts))
        num_pending = self.hints.redis.zcard(self.hints.keys.pending(RUN))
        return num_segments + num_prompts + num_pending

    def objects(self) -> dict[str, bytes]:
        return {key: self.store.get(key) for key, _ in self.store.list("")}

    def pending(self) -> set[bytes]:
        names = self.hints.redis.zrange(self.hints.keys.pending(RUN), 0, -1)
        return set(cast("list[bytes]", names))

    def queue(self) -> str:
        return queue_of(read_spec(self.store, RUN))


@contextmanager
def place(settings: Settings, name: str, database: int) -> Iterator[Place]:
    """A place of its own in S3 and Redis; the queue is named by the target, so a database, too."""
    settings = dataclasses.replace(
        settings,
        run=RUN,
        s3_prefix=f"{settings.s3_prefix}/{name}",
        redis_url=settings.redis_url.removesuffix("/0") + f"/{database}",
    )
    store, hints = open_store(settings), open_hints(settings)
    hints.redis.flushdb()
    yield Place(settings, store, hints)
    hints.redis.flushdb()
    hints.app.close()
    hints.redis.close()
    store.client.close()


def kill_at(process: subprocess.Popen[bytes], place: Place, num_traces: int) -> int:
    """SIGKILL once there are so many traces; return how many there were then."""
    while place.num_traces() < num_traces and process.poll() is None:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children()  # not waited for yet: it is there, if ended
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "a reading process outlived its parent"
    return place.num_traces()


@pytest.mark.slow
def test_a_producer_killed_twenty_times_leaves_what_an_unbroken_one_leaves(
    settings: Settings, model_dir: Path, rows_file: RowsFile
) -> None:
    rows: list[Json] = [{"id": n, "user_turns": [f"question {n}"]} for n in range(NUM_ROWS)]
    rows[1234] = {"id": "bad"}
    rows[5678] = rows[42]
    path = rows_file(rows)
    settings = dataclasses.replace(settings, model=str(model_dir))
    with place(settings, "whole", 14) as whole, place(settings, "killed", 15) as killed:
        report = whole.finish(path)
        total = whole.num_traces()
        draw = random.Random(0)
        points = sorted(draw.sample(range(1, total), NUM_KILLS))

        stopped_at = [kill_at(killed.start(path), killed, point) for point in points]
        killed.finish(path)

        assert report["num_planned"] == 2 * (NUM_ROWS - 2)
        assert len(list(read_segments(whole.store, RUN))) >= 3
        assert sum(0 < at < total for at in stopped_at) >= NUM_KILLS // 2
        assert killed.objects() == whole.objects()
        assert killed.pending() == whole.pending()
        names = whole.hints.queued_names(whole.queue())
        assert killed.hints.queued_names(killed.queue()) == names
        assert killed.hints.num_queued(killed.queue()) == len(names) == report["num_batches"]


@pytest.mark.slow
def test_a_producer_killed_halfway_and_run_twice_sends_each_batch_once(
    settings: Settings, model_dir: Path, rows_file: RowsFile
) -> None:
    path = rows_file([{"id": n, "user_turns": ["a"]} for n in range(3_000)] + [{"id": "bad"}])
    settings = dataclasses.replace(settings, model=str(model_dir))
    with place(settings, "halfway", 14) as halfway:
        kill_at(halfway.start(path), halfway, 1_000)  # of 2,000 batches

        first, second = halfway.finish(path), halfway.finish(path)

        assert (second["num_planned"], second["num_sent"]) == (0, 0)
        assert second["num_duplicates"] == first["num_rows"] - 1 == 3_000
        assert halfway.hints.num_queued(halfway.queue()) == len(halfway.pending()) == 2_000
