"""A worker's start: everything that work needs is checked and opened, or named in one clear line.

Called by worker; hands a Site on. Nothing is claimed before all of it holds: Redis answers, S3
keeps its one promise, the run is of this model, and the engine behind the URL is that run's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import celeryconfig
from dflash_workers import breaker, vitals
from dflash_workers.answering import MAX_TOOL_ROUNDS
from dflash_workers.breaker import Breaker
from dflash_workers.canary import check_engine
from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.errors import BadInput, Conflict, EngineUnavailable
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.engine import Engine, Patience
from dflash_workers.gate import POLL_S, Checks, Gate
from dflash_workers.holds import Holds
from dflash_workers.journal import Journals
from dflash_workers.lives import is_local
from dflash_workers.poison import Suspects
from dflash_workers.runs import Runs, open_runs
from dflash_workers.worksite import Habits, Site, Tally

log = logging.getLogger(__name__)

NOTES_TIMEOUT_S = 5.0  # a turn waits so long for a Redis that has gone silent
SENDING_TIMEOUT_S = 5.0  # and so does the sweep
# A host that vanishes without a word costs at most so many tokens of each answer. A note costs a
# millisecond of the event loop for a thousand ids.
NOTE_EVERY = 1024

# A batch waits so long for an engine that died. One that loads a large model takes longer: others
# may have its batches, or this worker later, and go on from what is noted.
REVIVE_S = 10.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Options:
    """How one worker process behaves."""

    wait_s: float = 60.0  # for the engine to be ready
    # For running prompts to end, once told to go. None by default: what is half done is noted and
    # gone on with elsewhere, so that waiting saves a prefill and delays everything else.
    grace_s: float = 0.0
    num_batches: int = 0  # at once; 0: enough to keep the engine full
    note_every: int = NOTE_EVERY  # ids between two notes of an answer that is still coming; 0: none
    max_tool_rounds: int = MAX_TOOL_ROUNDS
    progress_every_s: float = 5.0
    timing: Timing = field(default_factory=Timing)
    patience: Patience = field(default_factory=Patience)
    breaker: breaker.Limits = field(default_factory=breaker.Limits)
    vitals: vitals.Limits = field(default_factory=vitals.Limits)


def open_site(settings: Settings, options: Options) -> Site:
    """Check everything that work needs; raise what is missing."""
    # A prompt at a time is encoded here: handing it to a pool of threads takes longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = settings.require_run()
    hints = _open_sender(settings)
    check_redis(hints.redis, settings)
    store = open_store(settings)
    check_store(store, run)
    runs = open_runs(store, run, settings.model)
    renewing = _open_own_redis(settings, options.timing.renew_every_s, num_retries=0)
    noting = _open_own_redis(settings, NOTES_TIMEOUT_S, num_retries=1)
    loop = _start_loop()
    engine = run_in(loop, _make_engine(settings, options, runs))
    checks = Checks(
        run=run,
        away_s=min(REVIVE_S, options.patience.away_s),
        engine=lambda name: _check_engine(name, engine, runs, store),
        store=lambda: check_store(store, run),
        redis=lambda: check_redis(hints.redis, settings),
    )
    gate = Gate(engine, loop, checks, Breaker(options.breaker))
    run_in(loop, _wait_for_engine(engine, gate, run, options.wait_s))
    return Site(
        slot=settings.slot or default_slot(settings.engine_url),
        queue=runs.queue_of(run),
        habits=Habits(options.note_every, options.max_tool_rounds),
        store=store,
        hints=hints,
        claims=Claims(hints.redis, hints, options.timing),
        holds=Holds(Claims(renewing, hints, options.timing)),
        journals=Journals(noting, hints.keys, hints.where),
        suspects=Suspects(noting, hints.keys, hints.where),
        runs=runs,
        engine=engine,
        loop=loop,
        gate=gate,
        tally=Tally(),
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


def default_slot(engine_url: str) -> str:
    """A name that is the same after a restart and no other worker's: this host's, and the port of
    the engine, or host and port of one elsewhere.
    """
    where = urlsplit(engine_url)
    parts = [socket.gethostname(), f"{where.port or where.scheme}"]
    if not is_local(where.hostname or ""):
        parts.insert(1, where.hostname or "")
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts)).lstrip("._-")[:100]


def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, Result]) -> Result:
    """The work's result, from another thread than the loop's."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _make_engine(settings: Settings, options: Options, runs: Runs) -> Engine:
    return Engine(
        settings.engine_url,
        settings.max_in_flight,
        options.patience,
        dialect=settings.engine_dialect,
        tokenizer=runs.open(settings.run).chat,
    )


async def _wait_for_engine(engine: Engine, gate: Gate, run: str, wait_s: float) -> None:
    """Something else may answer at its URL while it loads: a proxy, or its first process."""
    deadline_s = time.monotonic() + wait_s
    try:
        while True:
            try:
                await engine.wait_until_there(max(deadline_s - time.monotonic(), 0))
                await gate.admit(run)
                return
            except EngineUnavailable as error:
                if time.monotonic() >= deadline_s:
                    raise EngineUnavailable(
                        f"no engine within {wait_s:.0f} s: {error}: start it, wait longer with "
                        "--wait-s, or pass --engine-url"
                    ) from error
            await asyncio.sleep(POLL_S)
    except BaseException:
        await engine.close()
        raise


async def _check_engine(run: str, engine: Engine, runs: Runs, store: Store) -> None:
    opened = runs.open(run)
    verdict = await check_engine(engine, opened.spec, opened.chat, store)
    for warning in verdict.warnings:
        log.warning("run %r: %s", run, warning)
    if verdict.mean_difference is not None and not verdict.is_first:
        log.info(
            "run %r: the engine is the run's, log-probabilities differ by %.4f on average",
            run,
            verdict.mean_difference,
        )


def _open_sender(settings: Settings) -> Hints:
    """For the process' own messages. Celery's consumer may wait half a minute for a silent Redis;
    who gives a batch back or sweeps may not.
    """
    hints = open_hints(settings)
    options = celeryconfig.broker_transport_options | {
        "socket_timeout": SENDING_TIMEOUT_S,
        "socket_connect_timeout": SENDING_TIMEOUT_S,
        "retry_on_timeout": False,
    }
    hints.app.conf.update(broker_transport_options=options)
    client = _open_own_redis(settings, SENDING_TIMEOUT_S, num_retries=1)
    return dataclasses.replace(hints, redis=client)


def _open_own_redis(settings: Settings, timeout_s: float, *, num_retries: int) -> redis.Redis:
    client = open_redis(settings, timeout_s=timeout_s)
    client.set_retry(Retry(NoBackoff(), num_retries))
    return client


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
