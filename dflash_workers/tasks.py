"""The Celery task: a hint comes in, a batch is claimed and worked off, one line is logged.

From <- the queue; to -> generate. The outermost frame of a batch: nothing raised below leaves it. A
hint that can never be worked on here (unknown schema, run or plan) goes to a dead-letter list with
its reason; a hint that can't be worked on now goes back, after a pause.
"""

from __future__ import annotations

import logging
import time

import celery
import orjson

import celeryconfig
from dflash_workers.contract.errors import (
    BadInput,
    Corrupt,
    Draining,
    FleetError,
    LeaseLost,
    Missing,
    Transient,
)
from dflash_workers.contract.hints import translated_redis
from dflash_workers.contract.keys import DEAD_KEPT, batch_name
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    Commit,
    Json,
    decode,
    encode,
)
from dflash_workers.generate import Batch, Site, generate, open_batch

log = logging.getLogger(__name__)

PAUSE_S = 10.0  # before this slot takes more, after something outside failed


def register(app: celery.Celery, site: Site) -> None:
    """Make `site` answer the app's messages."""

    @app.task(name=celeryconfig.GENERATE_TASK)
    def generate_task(**facts: object) -> None:
        take(facts, site)


def take(facts: Json, site: Site, *, pause_s: float = PAUSE_S) -> None:
    """One hint, to its end."""
    try:
        message = _message(facts, site)
        if message is not None:
            _work(message, site, pause_s)
    except FleetError as error:
        log.warning("hint dropped, reconcile will send it again: %s", error)
        site.holds.draining.wait(pause_s)
    except Exception:
        log.exception("hint %s: unexpected; its claim lapses and another tries", facts)
        site.holds.draining.wait(pause_s)


def _message(facts: Json, site: Site) -> BatchMessage | None:
    try:
        message = decode(BatchMessage, facts)
    except Corrupt as error:
        _bury("schema", facts, error, site)
        return None
    if message.schema != SCHEMA_VERSION:
        unknown = Corrupt(f"schema {message.schema}, this worker knows {SCHEMA_VERSION}")
        _bury("schema", facts, unknown, site)
        return None
    return message


def _work(message: BatchMessage, site: Site, pause_s: float) -> None:
    if site.holds.draining.is_set():
        site.hints.give_back(message, site.queue)
        return
    try:
        batch = _open(message, site)
        claim = site.claims.claim(message) if batch else None
    except Transient as error:
        log.warning("hint goes back: %s", error)
        site.holds.draining.wait(pause_s)
        site.hints.give_back(message, site.queue)
        return
    if batch is None or claim is None:  # no such batch, or another holds it
        return
    started = time.monotonic()
    try:
        commit = generate(batch, claim, site)
    except (Draining, LeaseLost) as error:
        log.info("%s", error)
    except FleetError as error:
        log.warning("%s given back: %s", claim.name, error)
        site.holds.draining.wait(pause_s)
    else:
        log.info("%s", _line(commit, claim.attempt, time.monotonic() - started))


def _open(message: BatchMessage, site: Site) -> Batch | None:
    try:
        return open_batch(message, site)
    except (Missing, BadInput, Corrupt) as error:
        _bury("plan", encode(message), error, site)
        return None


def _bury(reason: str, facts: Json, error: FleetError, site: Site) -> None:
    """Keep the hint for people. No claim was made, so a batch that is planned comes back."""
    log.error("dead letter (%s): %s", reason, error)
    key = site.hints.keys.dead(reason)
    letter = orjson.dumps({"message": facts, "error": str(error), "at": time.time()})
    with translated_redis(site.hints.where):
        site.hints.redis.lpush(key, letter)
        site.hints.redis.ltrim(key, 0, DEAD_KEPT - 1)


def _line(commit: Commit, attempt: str, seconds: float) -> str:
    name = batch_name(commit.segment, commit.batch)
    if commit.attempt != attempt:
        return f"{name} was committed by {commit.worker} already"
    return (
        f"{name} committed: {commit.num_rows} rows, {len(commit.rejected)} rejected, "
        f"{commit.output_tokens} tokens in {seconds:.1f} s"
    )
