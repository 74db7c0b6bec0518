"""The Celery task: a hint comes in, a batch is claimed and worked off, one line is logged.

From <- the queue; to -> generate. The outermost frame of a batch: nothing raised below leaves it. A
hint that can never be worked on (unknown schema, run or plan) goes to a dead-letter list with its
reason; one of another target goes to that target's queue; one that can't be worked on now goes back
at once, for others may be able to, and this slot pauses, or waits until it could be. A hint of a
paused or cancelled run is dropped before the claim: `resume` sends it again. No engine is needed
for a claim: rounds has it admitted before it is asked anything, and what is noted needs none.
"""

from __future__ import annotations

import logging
import time

import celery

import celeryconfig
from dflash_workers.contract.control import RunState
from dflash_workers.contract.errors import (
    BadInput,
    Cancelled,
    Corrupt,
    Draining,
    FleetError,
    LeaseLost,
    Missing,
    QueueUnavailable,
)
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    Commit,
    Json,
    decode,
    encode,
)
from dflash_workers.dead_letters import bury
from dflash_workers.generate import Batch, generate, open_batch
from dflash_workers.worksite import DEAD, FOREIGN, RECEIVED, Site

log = logging.getLogger(__name__)

# Before this slot takes more, after something outside failed. What is broken for longer closes the
# gate; until then nobody else's batch should wait long for a slot that could work again.
PAUSE_S = 3.0
_FOREIGN_PAUSE_S = 1.0  # two workers that disagree about a run's target must not play ball
_A_LINE_EACH = 1000  # a paused run may have tens of thousands of hints waiting
_TOLD_CHARS = 200  # of a result: it goes through Redis to Flower, which keeps thousands


def register(app: celery.Celery, site: Site) -> None:
    """Make `site` answer the app's messages."""

    @app.task(name=celeryconfig.GENERATE_TASK)
    def generate_task(*unexpected: object, **facts: object) -> str:
        return take(facts | {"args": unexpected} if unexpected else facts, site)


def take(facts: Json, site: Site, *, pause_s: float = PAUSE_S) -> str:
    """One hint, to its end; what became of it, for people who look at Flower."""
    site.tally.add(RECEIVED)
    with site.tally.busy():
        try:
            message = _message(facts, site)
            return _work(message, site, pause_s) if message else "dead letter: unknown schema"
        except FleetError as error:
            log.warning("hint dropped, reconcile will send it again: %s", error)
            site.holds.draining.wait(pause_s)
            return _told("dropped", error)
        except Exception:
            log.exception("hint %s: unexpected; its claim lapses and another tries", facts)
            site.holds.draining.wait(pause_s)
            return "unexpected error: see this worker's log"


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


def _work(message: BatchMessage, site: Site, pause_s: float) -> str:
    why = "this worker leaves" if site.holds.draining.is_set() else site.gate.why_closed()
    if why:
        _give_back(message, site, pause_s)
        site.gate.wait_open(site.holds.draining)
        return _told("given back", why)
    try:
        batch = _open(message, site)
        claim = site.claims.claim(message) if batch else None
    except FleetError as error:
        log.warning("hint goes back: %s", error)
        _give_back(message, site, pause_s)
        site.holds.draining.wait(pause_s)
        return _told("given back", error)
    if batch is None or claim is None:
        return "nothing to work on here, or another worker holds it"
    started = time.monotonic()
    try:
        commit = generate(batch, claim, site)
    except (Draining, Cancelled, LeaseLost) as error:
        log.info("%s", error)
        return _told("not finished", error)
    except FleetError as error:
        log.warning("%s given back: %s", claim.name, error)
        site.holds.draining.wait(pause_s)
        return _told("given back", error)
    line = _line(commit, claim.attempt, time.monotonic() - started)
    log.info("%s", line)
    return line.removeprefix(f"{claim.name} ")


def _open(message: BatchMessage, site: Site) -> Batch | None:
    """The batch; None where it is not to be worked on, or never can be by this worker."""
    try:
        with site.gate.recording("store"):
            home = site.runs.queue_of(message.run)
        if home != site.queue:
            _send_home(message, home, site)
            return None
        with site.gate.recording("store"):
            state = site.runs.state(message.run)
            if state is RunState.ACTIVE:
                return open_batch(message, site)
        _note_dropped(message, state, site)
        return None
    except (Missing, BadInput, Corrupt) as error:
        _bury("plan", encode(message), error, site)
        return None


def _give_back(message: BatchMessage, site: Site, pause_s: float) -> None:
    """With Redis away, once it is back: this slot could take nothing else, and nobody else has it.

    Raises QueueUnavailable where this worker leaves before that.
    """
    is_said = False
    while True:
        try:
            return site.hints.give_back(message, site.queue)
        except QueueUnavailable as error:
            if not is_said:
                log.warning("hint of %s waits here: %s", message.batch, error)
            is_said = True
            if site.holds.draining.wait(pause_s):
                raise


def _send_home(message: BatchMessage, home: str, site: Site) -> None:
    num_foreign = site.tally.add(FOREIGN)
    if num_foreign == 1 or num_foreign % _A_LINE_EACH == 0:
        log.warning("run %r is of another target: %d hints sent home", message.run, num_foreign)
    site.hints.offer([message], home)
    site.holds.draining.wait(_FOREIGN_PAUSE_S)


def _note_dropped(message: BatchMessage, state: RunState, site: Site) -> None:
    num_dropped = site.runs.count_dropped(message.run)
    if num_dropped == 1 or num_dropped % _A_LINE_EACH == 0:
        log.info("run %r is %s: %d hints dropped", message.run, state.value, num_dropped)


def _bury(reason: str, facts: Json, error: FleetError, site: Site) -> None:
    site.tally.add(DEAD)
    bury(reason, facts, error, site)


def _told(what: str, why: object) -> str:
    return f"{what}: {why}"[:_TOLD_CHARS]


def _line(commit: Commit, attempt: str, seconds: float) -> str:
    name = batch_name(commit.segment, commit.batch)
    if commit.attempt != attempt:
        return f"{name} was committed by {commit.worker} already"
    reasons = ", ".join(sorted({rejected.reason for rejected in commit.rejected}))
    return (
        f"{name} committed: {commit.num_rows} rows, {len(commit.rejected)} rejected"
        f"{f' ({reasons})' if reasons else ''}, {commit.output_tokens} tokens in {seconds:.1f} s"
    )
