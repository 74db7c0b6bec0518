"""One batch, from claim to commit: what is noted, what is left, the data, the one commit.

From <- tasks, with a claim just made; to -> S3 (data, commit). Its thread waits on the batch's hold
for news while the event loop asks the engine. The order after each claim is fixed: what others
noted, then S3, because after another's commit the journal is empty. Whatever ends this early hands
the batch over, unless another holds it already. Nothing is deleted here: a late commit could name
it. While S3 is away the data stays in memory and nowhere else: each turn is journalled, so that
the next holder of a batch whose worker dies now makes the same data again without the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from dflash_workers.answering import Desk
from dflash_workers.claims import Claim
from dflash_workers.contract.commit import publish, read_commit, seal_rows
from dflash_workers.contract.errors import (
    Cancelled,
    Draining,
    EngineUnavailable,
    FleetError,
    LeaseLost,
    Missing,
    QueueUnavailable,
    Transient,
)
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    Commit,
    Prompt,
    Rejection,
    Row,
)
from dflash_workers.holds import Hold, News
from dflash_workers.journal import Journal
from dflash_workers.poison import Case
from dflash_workers.reading import Reader
from dflash_workers.rounds import Fate, Rounds
from dflash_workers.runs import Run
from dflash_workers.worksite import Site

log = logging.getLogger(__name__)

_ABORT_S = 1.5  # for requests in flight to be aborted and noted, within a 2 s goodbye
_CANCEL_S = 0.2  # more, for those that don't end by themselves
_PUBLISH_AGAIN_S = 5.0  # with S3 away; it has retried inside before that


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch and its run."""

    message: BatchMessage
    run: Run
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Work:
    """A claimed batch, and what is noted of it."""

    batch: Batch
    hold: Hold
    journal: Journal
    case: Case


def open_batch(message: BatchMessage, site: Site) -> Batch:
    """Raises Missing, BadInput, Corrupt where there is no such plan for this worker."""
    return Batch(message, site.runs.open(message.run), site.runs.prompts(message))


def generate(batch: Batch, claim: Claim, site: Site) -> Commit:
    """Work the claimed batch off; return the commit that stands, ours or another's.

    Raises LeaseLost; Cancelled, with the claim cleared; or, with the batch handed over, Draining
    or what went wrong.
    """
    try:
        with site.holds.holding(claim) as hold:
            work = Work(batch, hold, site.journals.open(claim), site.suspects.open(claim))
            commit = _look(work, site) or _make_commit(work, site)
    except LeaseLost:
        raise
    except Cancelled:
        _clear(claim, site)
        raise
    except FleetError:
        site.claims.release(claim, site.queue)
        raise
    _clear(claim, site)
    _announce(batch.message, site)
    return commit


def _clear(claim: Claim, site: Site) -> None:
    try:
        site.claims.clear(claim)
    except QueueUnavailable as error:
        log.warning("%s is over; whoever hears of it next will clear it: %s", claim.name, error)


def _announce(message: BatchMessage, site: Site) -> None:
    try:
        site.hints.announce(message)
    except QueueUnavailable as error:
        log.warning("tokenizers not told, their sweep will find it: %s", error)


def _look(work: Work, site: Site) -> Commit | None:
    """All that is due after a claim: what is noted, then whether somebody committed."""
    work.journal.load()
    work.case.load()
    message = work.batch.message
    try:
        with site.gate.recording("store"):
            return read_commit(site.store, message.run, message.segment, message.batch)
    except Missing:
        return None


def _make_commit(work: Work, site: Site) -> Commit:
    started_at = time.time()
    desk = _make_desk(work, site)
    with work.case.attending():
        fates = _answer_all(work, desk, site)
    if isinstance(fates, Commit):
        return fates
    rows = [fate for fate in fates if isinstance(fate, Row)]
    rejected = [fate for fate in fates if isinstance(fate, Rejection)]
    body, sha256 = seal_rows(rows)
    answers = [answer for row in rows for answer in row.answers]
    message, attempt = work.batch.message, work.hold.claim.attempt
    commit = Commit(
        schema=SCHEMA_VERSION,
        run=message.run,
        segment=message.segment,
        batch=message.batch,
        attempt=attempt,
        data_key=RunKeys(message.run).data(message.segment, message.batch, attempt),
        sha256=sha256,
        data_bytes=len(body),
        num_rows=len(rows),
        rejected=rejected,
        input_tokens=sum(len(answer.input_ids) for answer in answers),
        output_tokens=sum(len(answer.output_ids) for answer in answers),
        started_at=started_at,
        finished_at=time.time(),
        worker=site.slot,
        engine=site.engine.facts,
        notes=dict(+desk.counts),
    )
    return _publish(commit, body, work, site)


def _make_desk(work: Work, site: Site) -> Desk:
    run, habits = work.batch.run, site.habits
    # A note before the limit would save nothing that the end doesn't, and make the engine stream.
    note_every = habits.note_every if habits.note_every < run.spec.sampling.max_new_tokens else 0
    return Desk(
        run.spec,
        Reader(run.chat),
        site.engine,
        work.journal,
        on_turn=work.case.heed_progress,
        max_tool_rounds=habits.max_tool_rounds,
        note_every=note_every,
    )


def _answer_all(work: Work, desk: Desk, site: Site) -> list[Fate] | Commit:
    """Every prompt's fate, in the plan's order; or the commit, if another made it meanwhile."""
    hold = work.hold
    rounds = Rounds(work.batch.prompts, desk, work.case, site.gate)
    answering = asyncio.run_coroutine_threadsafe(_all_fates(rounds, hold), site.loop)
    news: News | None = None
    try:
        while (news := _wait(hold, rounds)) is not News.ENDED:
            _stop_if_told(news, hold)
            if news is News.CLOSING:
                site.loop.call_soon_threadsafe(rounds.close)
            elif commit := _look_again(work, site):
                return commit
        return answering.result()
    finally:
        if news is not News.ENDED:
            site.loop.call_soon_threadsafe(rounds.leave)
            if not _has_ended(hold, _ABORT_S):
                answering.cancel()
                _has_ended(hold, _CANCEL_S)
            if news is News.LOST:
                _leave_to_another(work, site)
            else:
                work.journal.flush()


def _leave_to_another(work: Work, site: Site) -> None:
    """Note what this process knows: a batch is lost after a flush of Redis, too, that took what was
    noted before. Notes of a batch that has its commit would be left behind: they are cleared.
    """
    with suppress(FleetError):
        if _look(work, site):
            _clear(work.hold.claim, site)


def _wait(hold: Hold, rounds: Rounds) -> News:
    """The next news. Raises EngineUnavailable once the batch stands still for too long."""
    while (left_s := rounds.due_s() - time.monotonic()) > 0:
        if news := hold.wait(left_s):
            return news
    raise EngineUnavailable(f"{hold.claim.name}: nothing of it ended or grew for too long")


async def _all_fates(rounds: Rounds, hold: Hold) -> list[Fate]:
    try:
        return await rounds.fates()
    finally:
        hold.tell(News.ENDED)


def _stop_if_told(news: News | None, hold: Hold) -> None:
    if news is News.LOST:
        raise LeaseLost(f"{hold.claim.name}: another worker holds it now")
    if news is News.CANCELLED:
        raise Cancelled(f"{hold.claim.name}: run {hold.claim.message.run!r} is cancelled: given up")
    if news is News.DRAIN:
        raise Draining(f"{hold.claim.name}: this worker is leaving")


def _look_again(work: Work, site: Site) -> Commit | None:
    """For a claim that was taken again while it was worked on."""
    try:
        return _look(work, site)
    except Transient as error:
        log.warning("%s: will look again: %s", work.hold.claim.name, error)
        work.hold.in_doubt = True
        return None


def _has_ended(hold: Hold, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0:
        if hold.wait(left_s) is News.ENDED:
            return True
    return False


def _publish(commit: Commit, body: bytes, work: Work, site: Site) -> Commit:
    """With S3 away, wait for it: the same bytes again and again, while the batch is ours."""
    while True:
        try:
            with site.gate.recording("store"):
                return publish(site.store, commit, body)
        except Transient as error:
            log.warning("%s: not committed yet: %s", work.hold.claim.name, error)
        news = work.hold.wait(_PUBLISH_AGAIN_S)
        _stop_if_told(news, work.hold)
        if news is News.AGAIN and (found := _look_again(work, site)):
            return found
