"""One worker process: what it checks, what runs in it, and how it leaves.

Made by app (for `celery -A`) and by cli (`dflash-fleet worker`). Beside Celery's pool of threads
run: the event loop with the engine's requests, the renewing of claims, the sweep (reap, heartbeat)
and the progress writer. On SIGTERM the running batches are given back, first in line, with every
finished turn noted, and Celery's warm shutdown, which waits for tasks without limit, finds them
ended. A second signal leaves at once; then leases lapse and others reap.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

import celery
import redis
from celery import signals
from redis.backoff import NoBackoff
from redis.retry import Retry

import celeryconfig
from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.errors import BadInput, Conflict, FleetError
from dflash_workers.contract.hints import check_redis, open_hints, open_redis, translated_redis
from dflash_workers.contract.keys import WORKER_S, RunKeys
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.engine import Engine, Patience
from dflash_workers.generate import Site
from dflash_workers.holds import Holds
from dflash_workers.journal import Journals
from dflash_workers.progress import ProgressWriter
from dflash_workers.runs import open_runs
from dflash_workers.tasks import register

log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 5.0  # a turn waits so long for a Redis that has gone silent
REPORT_EVERY_S = 60.0
_JOIN_S = 1.0  # a thread that waits for S3 or Redis doesn't hold up the goodbye

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Options:
    """How one worker process behaves."""

    wait_s: float = 60.0  # for the engine to be ready
    idle_exit_s: float = 0.0  # leave after so long without work; 0: never
    progress_every_s: float = 5.0
    timing: Timing = field(default_factory=Timing)
    patience: Patience = field(default_factory=Patience)


class Worker:
    """Everything of the process but Celery's own."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Check everything that work needs; raise, in one clear line, what is missing."""
        run = settings.require_run()
        hints = open_hints(settings)
        check_redis(hints.redis, settings)
        store = open_store(settings)
        check_store(store, run)
        runs = open_runs(store, run, settings.model)
        renewing = _open_own_redis(settings, options.timing.renew_every_s, num_retries=0)
        journaling = _open_own_redis(settings, JOURNAL_TIMEOUT_S, num_retries=1)
        loop = _start_loop()
        self._options = options
        self._writers: dict[str, ProgressWriter] = {}
        self._stop = threading.Event()
        self._busy_at = time.monotonic()
        self._reported = (time.monotonic(), 0)  # (when, tokens until then)
        self.site = Site(
            slot=settings.slot or socket.gethostname(),
            queue=celeryconfig.generate_queue(runs.open(run).spec.target.fingerprint()),
            store=store,
            hints=hints,
            claims=Claims(hints.redis, hints, options.timing),
            holds=Holds(Claims(renewing, hints, options.timing)),
            journals=Journals(journaling, hints.keys, hints.where),
            runs=runs,
            engine=_run_in(loop, _open_engine(settings, options)),
            loop=loop,
        )
        self._threads = [
            self._thread("sweep", options.timing.reap_every_s, self._sweep),
            self._thread("progress", options.progress_every_s, self._write_progress),
        ]

    def make_app(self) -> celery.Celery:
        """The Celery app that hands this worker its messages, from its target's queue alone."""
        app = self.site.hints.app
        app.conf.update(task_default_queue=self.site.queue)
        register(app, self.site)
        signals.worker_init.connect(lambda **_: self.start(), weak=False)
        signals.worker_shutting_down.connect(lambda **_: self.drain(), weak=False)
        signals.worker_shutdown.connect(lambda **_: self.stop(), weak=False)
        return app

    def start(self) -> None:
        """Begin to renew, to sweep and to write progress."""
        self.site.holds.start()
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Take nothing new, give back what runs. Called inside the first signal's handler."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave_at_once)
        self.site.holds.drain()

    def stop(self) -> None:
        """After the last task."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self.site.holds.stop(_JOIN_S)
        _run_in(self.site.loop, self.site.engine.close())
        self.site.loop.call_soon_threadsafe(self.site.loop.stop)
        try:
            with translated_redis(self.site.hints.where):
                self.site.hints.redis.delete(self.site.hints.keys.worker(self.site.slot))
            for writer in self._writers.values():
                writer.leave()
        except FleetError as error:
            log.warning("heartbeat and progress lease left to lapse: %s", error)

    def _sweep(self) -> None:
        """Bring back what dead workers held; say that this one lives."""
        for run in self.site.runs:
            for name in self.site.claims.reap(run, self.site.queue):
                log.info("%s: its holder is gone, given back", name)
        num_queued = self.site.hints.num_queued(self.site.queue)
        self._beat(num_queued)
        if num_queued or len(self.site.holds):
            self._busy_at = time.monotonic()
        idle_s = time.monotonic() - self._busy_at
        if 0 < self._options.idle_exit_s < idle_s and not self.site.holds.draining.is_set():
            log.info("no work for %.0f s: leaving", idle_s)
            os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, num_queued: int) -> None:
        """The hash `worker:<slot>`, and a line a minute."""
        site, engine = self.site, self.site.engine
        since, tokens = self._reported
        seconds = time.monotonic() - since
        facts = {
            "state": "draining" if site.holds.draining.is_set() else "up",
            "batches": f"{len(site.holds)}",
            "in_flight": f"{engine.num_running}",
            "tokens_per_s": f"{(engine.num_tokens - tokens) / max(seconds, 1e-3):.1f}",
        }
        key = site.hints.keys.worker(site.slot)
        with translated_redis(site.hints.where):
            site.hints.redis.hset(key, items=[text for fact in facts.items() for text in fact])
            site.hints.redis.expire(key, WORKER_S)
        if seconds > REPORT_EVERY_S:
            self._reported = (time.monotonic(), engine.num_tokens)
            log.info("%s, %d queued", ", ".join(f"{k} {v}" for k, v in facts.items()), num_queued)

    def _write_progress(self) -> None:
        site = self.site
        for run in site.runs:
            if run not in self._writers:
                client, keys = site.hints.redis, site.hints.keys
                self._writers[run] = ProgressWriter(client, keys, site.store, run)
            self._writers[run].write()

    def _thread(self, name: str, every_s: float, step: Callable[[], None]) -> threading.Thread:
        return threading.Thread(
            target=_repeat, args=(step, every_s, self._stop), name=name, daemon=True
        )


def check_store(store: Store, run: str) -> None:
    """Raise where S3 can't be reached, written, or relied on to write a key only once."""
    store.check()
    key = RunKeys(run).probe(uuid.uuid4().hex)
    store.put_new(key, b"first")
    try:
        store.put_new(key, b"second")
    except Conflict:
        return
    finally:
        store.delete(key)
    raise BadInput(
        f"{store.url('')}: this S3 ignores If-None-Match, so batches could overwrite each other: "
        "use one that honours it"
    )


def _repeat(step: Callable[[], None], every_s: float, stop: threading.Event) -> None:
    """The outermost frame of a thread: one line per new trouble, never an end."""
    trouble = ""
    while not stop.wait(every_s):
        try:
            step()
            trouble = ""
        except FleetError as error:
            if str(error) != trouble:
                log.warning("%s", error)
            trouble = str(error)
        except Exception:
            log.exception("unexpected, goes on")


def _start_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "linux":
        import uvloop  # not to be had elsewhere

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    threading.Thread(target=_run_loop, args=(loop,), name="loop", daemon=True).start()
    return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, Result]) -> Result:
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _open_engine(settings: Settings, options: Options) -> Engine:
    engine = Engine(settings.engine_url, settings.max_in_flight, options.patience)
    try:
        await engine.wait_until_ready(options.wait_s)
        await engine.facts()
    except FleetError:
        await engine.close()
        raise
    return engine


def _open_own_redis(settings: Settings, timeout_s: float, *, num_retries: int) -> redis.Redis:
    client = open_redis(settings, timeout_s=timeout_s)
    client.set_retry(Retry(NoBackoff(), num_retries))
    return client


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(1)
