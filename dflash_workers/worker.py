"""One worker process: what runs in it beside Celery's pool of threads.

Made by app (for `celery -A`) and by cli (`dflash-fleet worker`), after opening has checked all that
work needs. Threads: the event loop with the engine's requests, the renewing of claims, the sweep
(vitals), the mending of what keeps this worker from taking work (gate), the progress writer, a look
at whether a run that is worked on was cancelled, one at spot notices, and the goodbye. Each goes on
after every error; they end when Celery has ended its last task.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import celery
from celery import signals

from dflash_workers.contract.control import RunState
from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.engine import DIALECTS
from dflash_workers.gate import POLL_S
from dflash_workers.goodbye import HAND_OVER_S, Goodbye
from dflash_workers.heirs import Heirs
from dflash_workers.inbox import guard_inbox
from dflash_workers.notices import LOOK_EVERY_S, open_notices
from dflash_workers.opening import Options, open_site, run_in
from dflash_workers.pace import Pace
from dflash_workers.progress import ProgressWriter
from dflash_workers.tasks import register
from dflash_workers.vitals import Limits, Vitals
from dflash_workers.worksite import Site

log = logging.getLogger(__name__)

_JOIN_S = 1.0  # a thread that waits for S3 or Redis doesn't hold up the goodbye

# Batches at once: prompts for ten times the limit. Of lengths that vary as a target's do (their
# deviation is their mean), simulated at a limit of 48 in batches of 64, three at once keep the
# engine 68 % full, six 99.6 %, eight 100 %; in batches of 256 three do.
MIN_BATCHES = 3
MAX_BATCHES = 64
_FULL_TIMES = 10
_USUAL_BATCH = 64  # prompts, where nothing is planned yet

# What a thread does again and again; it may say in how many seconds, if that is before its turn.
Step = Callable[[], float | None]


class Worker:
    """Everything of the process but Celery's own."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Raises, in one clear line, what is missing."""
        self.site = open_site(settings, options)
        self.goodbye = Goodbye(self.site.holds, options.grace_s)
        self.num_batches = options.num_batches or batches_at_once(
            largest_batch(self.site.store, settings.require_run()), settings.max_in_flight
        )
        self._settings = settings
        self._vitals = Vitals(self.site, self.goodbye, _limits(settings, options, self.site))
        self._heirs = Heirs(self.site)
        self._writers: dict[str, ProgressWriter] = {}
        self._stop = threading.Event()
        every_s = options.timing.reap_every_s
        self._threads = [
            self._thread("sweep", every_s, self._vitals.sweep),
            # Beside the sweep: an S3 that hangs must not keep dead workers' batches waiting.
            self._thread("gate", POLL_S, self.site.gate.mend),
            self._thread("control", every_s, self._heed_cancels),
            self._thread("progress", options.progress_every_s, self._write_progress),
        ]
        if notices := open_notices(settings):
            look = self._thread("notices", LOOK_EVERY_S, lambda: self.goodbye.look(notices))
            self._threads.append(look)

    def make_app(self) -> celery.Celery:
        """The Celery app that hands this worker its messages, from its target's queue alone."""
        app = open_hints(self._settings).app
        app.conf.update(task_default_queue=self.site.queue, worker_concurrency=self.num_batches)
        register(app, self.site)
        guard_inbox(app, self.site)
        signals.worker_ready.connect(self._on_ready, weak=False)
        signals.worker_shutting_down.connect(lambda **_: self.goodbye.begin(), weak=False)
        signals.worker_shutdown.connect(self._on_shutdown, weak=False)
        _spare_collections()
        return app

    def start(self) -> None:
        """Begin to renew, to sweep and to write progress."""
        self.site.holds.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the last task."""
        self._heirs.join(HAND_OVER_S)
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self.site.holds.stop(_JOIN_S)
        run_in(self.site.loop, self.site.engine.close())
        self.site.loop.call_soon_threadsafe(self.site.loop.stop)
        try:
            self._vitals.leave()
            for writer in self._writers.values():
                writer.leave()
        except FleetError as error:
            log.warning("heartbeat and progress lease left to lapse: %s", error)

    def _on_ready(self, sender: Any, **_: object) -> None:
        """Celery's consumer, the sender, is connected. Signals pass more than is named here."""
        self._vitals.num_slots = sender.pool.num_processes
        self._vitals.consumer = sender
        self._vitals.heirs = self._heirs
        self.goodbye.start()
        self.start()

    def _on_shutdown(self, sender: Any, **_: object) -> None:
        self.stop()
        if self.goodbye.exit_code:
            sender.exitcode = self.goodbye.exit_code

    def _heed_cancels(self) -> None:
        """Have the batches of cancelled runs given up."""
        for run in self.site.holds.runs():
            if self.site.runs.state(run) is RunState.CANCELLED:
                self.site.holds.cancel(run)

    def _write_progress(self) -> None:
        site = self.site
        for run in site.runs:
            if run not in self._writers:
                client, keys = site.hints.redis, site.hints.keys
                self._writers[run] = ProgressWriter(client, keys, site.store, run)
            self._writers[run].write()

    def _thread(self, name: str, every_s: float, step: Step) -> threading.Thread:
        return threading.Thread(
            target=_repeat, args=(step, every_s, self._stop), name=name, daemon=True
        )


def _spare_collections() -> None:
    """What start-up made stays. Walking it all, each full collection stopped every answer for half
    a second, and took a quarter of the worker's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def batches_at_once(batch_size: int, max_in_flight: int) -> int:
    """How many keep the engine full while each one's last prompts end."""
    wanted = -(-_FULL_TIMES * max_in_flight // batch_size)
    return min(max(wanted, MIN_BATCHES), MAX_BATCHES)


def largest_batch(store: Store, run: str) -> int:
    """Prompts in the largest batch of the plan's first segment that has any."""
    for segment in read_segments(store, run):
        if segment.batches:
            return max(len(batch.prompt_keys) for batch in segment.batches)
    return _USUAL_BATCH


def _limits(settings: Settings, options: Options, site: Site) -> Limits:
    """Where answers are not streamed, the first sign of life of an engine is a whole one."""
    limits = options.vitals
    if DIALECTS[settings.engine_dialect].can_stream:
        return limits
    sampling = site.runs.open(settings.run).spec.sampling
    answer_s = Pace(options.patience).limit_s(sampling.max_new_tokens)
    engine_s = max(answer_s, limits.watchdog.engine_s)
    return replace(limits, watchdog=replace(limits.watchdog, engine_s=engine_s))


def _repeat(step: Step, every_s: float, stop: threading.Event) -> None:
    """The outermost frame of a thread: one line per new trouble, never an end."""
    trouble, wait_s = "", 0.0  # at once: a dead worker's batch may be waiting
    while not stop.wait(wait_s):
        wait_s = every_s
        try:
            wait_s = min(step() or every_s, every_s)
            trouble = ""
        except FleetError as error:
            if str(error) != trouble:
                log.warning("%s", error)
            trouble = str(error)
        except Exception:
            log.exception("unexpected, goes on")
