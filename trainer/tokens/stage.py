"""The tokenizers of a fleet: a hint per committed batch -> its shard, in processes of Celery's.

Workers send the hint after a commit; build.py makes the shard. A hint that was lost, with Redis or
with a process that was killed, is made good by a sweep: whenever the queue is empty, one of the
stage's workers is asked to look for commits without a shard. So any worker may die at any time, and
a batch that two work on is made twice and stands once. Nothing is held in Redis meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import celery
from celery import signals

import celeryconfig
from dflash_workers.contract.errors import Corrupt, FleetError, Transient
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import SCHEMA_VERSION, BatchMessage, Json, decode
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from trainer.tokens.build import Builder, Outcome
from trainer.tokens.counters import Counters
from trainer.tokens.sweep import untokenized

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0
# With S3 away. A hint that is dropped after the last pause comes back by a sweep.
PAUSES_S = (1, 2, 4, 8, 16, 30)


def make_app(
    settings: Settings, *, sweep_every_s: float = SWEEP_EVERY_S, counters: Counters | None = None
) -> celery.Celery:
    """The Celery app of one worker; each process of its pool opens what it needs itself.

    `counters`: those that somebody serves, made before the pool forks.
    """
    hints, counting = open_hints(settings), counters or Counters()
    app = hints.app
    app.conf.update(worker_pool="prefork", task_default_queue=celeryconfig.TOKENIZE_QUEUE)

    @app.task(name=celeryconfig.TOKENIZE_TASK)
    def tokenize(**facts: Any) -> None:
        tokenize_batch(settings, facts, counting)

    @app.task(name=celeryconfig.SWEEP_TASK)
    def sweep(run: str) -> None:
        sweep_run(settings, run)

    # A receiver is enough to keep Celery from setting up logs of its own.
    signals.setup_logging.connect(lambda **_: None, weak=False)
    sweeper = Sweeper(hints, settings, sweep_every_s)
    signals.task_received.connect(sweeper.note, weak=False)
    signals.worker_ready.connect(sweeper.start, weak=False)
    return app


def tokenize_batch(settings: Settings, facts: Json, counters: Counters) -> None:
    """The task: one batch. The outermost frame of a process' work: says what failed, never ends."""
    try:
        message = _message(facts)
        outcome = _patiently(partial(_make, settings, message))
        _count(outcome, counters)
        log.info("%s", _line(outcome))
    except FleetError as error:
        counters.add("failures")
        log.warning("hint dropped: %s", error)
    except Exception:
        counters.add("failures")
        log.exception("hint %s: unexpected; the sweep brings it back", facts)


def sweep_run(settings: Settings, run: str) -> None:
    """The task: hints for the run's commits that have no shard."""
    try:
        missing = untokenized(open_store(settings), run, has_model=bool(settings.model))
        num_told = open_hints(settings).tell_tokenizers(missing)
    except FleetError as error:
        log.warning("run %r was not swept: %s", run, error)
    else:
        log.info("run %r: %d commits without a shard", run, num_told)


class Sweeper:
    """In the worker's main process: asks for a sweep now and then, of the runs that it knows."""

    def __init__(self, hints: Hints, settings: Settings, every_s: float) -> None:
        self._hints = hints
        self._runs = {settings.run} - {""}
        self._every_s = every_s

    def note(self, request: Any, **_: object) -> None:
        """A message came in: its run is known from now on."""
        run = request.kwargs.get("run")
        if isinstance(run, str):
            self._runs.add(run)

    def start(self, sender: Any, **_: object) -> None:
        """`sender`: Celery's consumer, which is connected."""
        log.info("ready: runs %s", ", ".join(sorted(self._runs)) or "as they come")
        self.look()
        sender.timer.call_repeatedly(self._every_s, self.look)

    def look(self) -> None:
        """Where nothing waits: ask one worker, whoever it is, to sweep."""
        queue = celeryconfig.TOKENIZE_QUEUE
        try:
            self._say_up()
            if self._hints.num_queued(queue):
                return
            for run in sorted(self._runs):
                if self._is_due(run):
                    with translated_redis(self._hints.where):
                        self._hints.app.send_task(
                            celeryconfig.SWEEP_TASK, kwargs={"run": run}, queue=queue, retry=False
                        )
        except FleetError as error:
            log.warning("no sweep: %s", error)

    def _say_up(self) -> None:
        """So that workers announce their commits."""
        with translated_redis(self._hints.where):
            lapses_ms = int(3000 * self._every_s)
            self._hints.redis.set(self._hints.keys.tokenizers, b"", px=lapses_ms)

    def _is_due(self, run: str) -> bool:
        """Whether no other worker has asked lately."""
        key, lapses_ms = self._hints.keys.sweep(run), int(self._every_s * 900)
        with translated_redis(self._hints.where):
            return bool(self._hints.redis.set(key, b"", nx=True, px=lapses_ms))


def _message(facts: Json) -> BatchMessage:
    message = decode(BatchMessage, facts)
    if message.schema != SCHEMA_VERSION:
        raise Corrupt(f"schema {message.schema}, this tokenizer knows {SCHEMA_VERSION}")
    return message


def _make(settings: Settings, message: BatchMessage) -> Outcome:
    builder = _builder_of(dataclasses.replace(settings, run=message.run))
    return builder.make(message.segment, message.batch)


@cache
def _builder_of(settings: Settings) -> Builder:
    store = open_store(settings)
    return Builder(store, read_spec(store, settings.run), settings.model)


def _patiently(make: Callable[[], Outcome]) -> Outcome:
    for pause_s in PAUSES_S:
        try:
            return make()
        except Transient as error:
            log.warning("again in %d s: %s", pause_s, error)
            time.sleep(pause_s)
    return make()


def _count(outcome: Outcome, counters: Counters) -> None:
    if outcome.quarantined:
        counters.add("quarantined")
    elif outcome.provenance and outcome.is_new:
        counters.add("shards")
        counters.add("samples", outcome.provenance["num_samples"])
        counters.add("tokens", outcome.provenance["num_tokens"])


def _line(outcome: Outcome) -> str:
    if outcome.quarantined:
        return f"{outcome.key} quarantined: {outcome.quarantined}"
    if outcome.provenance is None:
        return f"{outcome.key} waits for --model, the folder of the target's tokenizer"
    if not outcome.is_new:
        return f"{outcome.key} was there already"
    made = outcome.provenance
    return f"{outcome.key}: {made['num_samples']} samples, {made['num_tokens']} tokens"
