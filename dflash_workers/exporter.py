"""The fleet's numbers for Prometheus, measured every few seconds from S3 and Redis.

Runs beside the fleet, once: alerts and an autoscaler read it, because no worker can say that all
workers are gone. It is one more candidate for writing progress.json and for observing who comes and
goes, so both go on when the last worker has ended. While S3 or Redis is away the last numbers
stand, with the time at which they were measured, and `up` says which is missing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_workers.contract.control import RunState
from dflash_workers.contract.errors import FleetError, Missing, QueueUnavailable
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.queues import Queues
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store
from dflash_workers.exposition import Numbers
from dflash_workers.heartbeats import figures_of, read_beats
from dflash_workers.progress import RUNNING, ProgressWriter
from dflash_workers.status import Overview, count_dead

log = logging.getLogger(__name__)

_STATES = ("waiting", RUNNING, "done", *(s.value for s in RunState if s is not RunState.ACTIVE))
_WORKER_STATES = ("up", "draining", "paused")
_NUM_REASONS = 20  # of a label; the others are one
_OTHERS = "others"

# Our names for a run's figures, and status' names for them.
_SAME = {
    "planned_prompts": "total",
    "completed_prompts": "completed",
    "failed_prompts": "failed",
    "input_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "made_again_tokens": "made_again_tokens",
    "committed_batches": "s3_uploaded",
    "committed_bytes": "s3_bytes",
    "rate_prompts_per_second": "rate_per_sec",
    "queued_messages": "num_queued",
    "pending_batches": "num_pending",
    "inflight_batches": "num_inflight",
    "untokenized_batches": "num_untokenized",
    "quarantined_batches": "num_quarantined",
    "gpu_hours": "gpu_hours",
}
_ETAS = {"low": "eta_low_hours", "likely": "eta_hours", "high": "eta_high_hours"}


@dataclass(slots=True)
class _Run:
    """One that is followed."""

    overview: Overview
    writer: ProgressWriter
    numbers: Numbers = field(default_factory=Numbers)


class Exporter:
    """Measures in one thread; what it measured last may be read from any."""

    def __init__(
        self, store: Store, queues: Queues, runs: Sequence[str], progress_file: Path | None = None
    ) -> None:
        """Raises Missing where there is no such run. `progress_file`: a copy of the first run's
        progress.json on this disk.
        """
        self._store, self._queues = store, queues
        self._runs = [
            _Run(
                Overview(store, queues, run), ProgressWriter(queues.redis, queues.keys, store, run)
            )
            for run in runs
        ]
        self._progress_file = progress_file
        self._up = {"redis": False, "store": False}

    def read(self) -> Numbers:
        """What was measured last."""
        numbers = Numbers()
        for run in self._runs:
            for name, values in run.numbers.values.items():
                numbers.values.setdefault(name, {}).update(values)
            up = {name: float(is_up) for name, is_up in self._up.items()}
            numbers.put_all("dflash_fleet_up", up, run.overview.run)
        return numbers

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Until told to stop: the process' outermost frame."""
        trouble = ""
        while not stop.is_set():
            try:
                self.measure()
                trouble = ""
            except FleetError as error:
                if f"{error}" != trouble:
                    log.warning("%s", error)
                trouble = f"{error}"
            except Exception:
                log.exception("unexpected, goes on")
            stop.wait(every_s)
        for run in self._runs:
            run.writer.leave()

    def measure(self) -> None:
        """Once. Raises what was away, with the old numbers standing."""
        try:
            for run in self._runs:
                run.writer.write()
                run.numbers = self._numbers(run.overview.run, run.overview.read())
        except QueueUnavailable:
            self._up["redis"] = False
            raise
        except FleetError:
            self._up["store"] = False
            raise
        self._up = {"redis": True, "store": True}
        if self._progress_file:
            self._copy_progress(self._progress_file)

    def _numbers(self, run: str, status: Json) -> Numbers:
        numbers = Numbers()
        for name, theirs in _SAME.items():
            numbers.put(f"dflash_fleet_{name}", status[theirs], run)
        for bound, name in _ETAS.items():
            hours = status[name]
            seconds = None if hours is None else hours * 3600
            numbers.put("dflash_fleet_eta_seconds", seconds, run, bound)
        for state in _STATES:
            numbers.put("dflash_fleet_state", state == status["status"], run, state)
        numbers.put_all("dflash_fleet_rejections", _bounded(status["rejections"]), run)
        numbers.put_all("dflash_fleet_cost_usd", status["cost_usd"], run)
        numbers.put_all("dflash_fleet_dead_letters", count_dead(self._queues), run)
        lags = {lag["name"]: lag["num_behind"] for lag in status["trainers"]}
        numbers.put_all("dflash_fleet_trainer_lag_shards", lags, run)
        self._add_workers(numbers, run)
        numbers.put("dflash_fleet_measured_timestamp_seconds", time.time(), run)
        return numbers

    def _add_workers(self, numbers: Numbers, run: str) -> None:
        figures = figures_of(read_beats(self._queues.redis, self._queues.keys))
        by_state = {name: figures["workers"].get(name, 0) for name in _WORKER_STATES}
        numbers.put_all("dflash_fleet_workers", by_state, run)
        for name, theirs in (
            ("in_flight_requests", "in_flight"),
            ("limit_requests", "max_in_flight"),
            ("tokens_per_second", "tokens_per_s"),
            ("kv_use_ratio", "kv_use"),
            ("accept_length", "accept_length"),
        ):
            numbers.put(f"dflash_fleet_{name}", figures[theirs], run)

    def _copy_progress(self, path: Path) -> None:
        """Whole or not at all: who reads it while it is written reads the one before."""
        try:
            body = self._store.get(RunKeys(self._runs[0].overview.run).progress)
        except Missing:  # another process is about to write the first one
            return
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_bytes(body)
            scratch.replace(path)
        except OSError as error:
            log.warning("%s not written: %s", path, error.strerror)


def _bounded(counts: dict[str, int]) -> dict[str, int]:
    """The most frequent by name, all others as one."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    bounded = dict(ordered[:_NUM_REASONS])
    rest = sum(count for _name, count in ordered[_NUM_REASONS:])
    return bounded | {_OTHERS: rest} if rest else bounded
