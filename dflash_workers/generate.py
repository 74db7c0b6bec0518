"""One batch, from claim to commit: what is noted, what is left, the data, the one commit.

From <- tasks, with a claim just made; to -> S3 (data, commit). Its thread waits on the batch's hold
for news while the event loop asks the engine. The order after each claim is fixed: the journal,
then S3, because after another's commit the journal is empty. Whatever ends this early hands the
batch over, unless another holds it already. Nothing is deleted here: a late commit could name it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from dflash_workers.claims import Claim, Claims
from dflash_workers.contract.commit import publish, read_commit, seal_rows
from dflash_workers.contract.errors import (
    Draining,
    FleetError,
    LeaseLost,
    Missing,
    PromptRejected,
    QueueUnavailable,
    Transient,
)
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load_lines
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    Commit,
    Prompt,
    Rejection,
    Row,
)
from dflash_workers.contract.store import Store
from dflash_workers.engine import Engine
from dflash_workers.holds import Hold, Holds, News
from dflash_workers.journal import Journal, Journals
from dflash_workers.rollout import Desk, roll_out
from dflash_workers.runs import Run, Runs

log = logging.getLogger(__name__)

_ABORT_S = 1.5  # for requests in flight to be aborted, within a 2 s goodbye
_PUBLISH_AGAIN_S = 5.0  # with S3 away; it has retried inside before that


@dataclass(frozen=True, slots=True)
class Site:
    """What this process works with."""

    slot: str
    queue: str
    store: Store
    hints: Hints
    claims: Claims
    holds: Holds
    journals: Journals
    runs: Runs
    engine: Engine
    loop: asyncio.AbstractEventLoop  # where the engine lives


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch and its run."""

    message: BatchMessage
    run: Run
    prompts: list[Prompt]


def open_batch(message: BatchMessage, site: Site) -> Batch:
    """Raises Missing, BadInput, Corrupt where there is no such plan for this worker."""
    run = site.runs.open(message.run)
    key = RunKeys(message.run).prompts(message.segment, message.batch)
    return Batch(message, run, load_lines(Prompt, site.store.get(key)))


def generate(batch: Batch, claim: Claim, site: Site) -> Commit:
    """Work the claimed batch off; return the commit that stands, ours or another's.

    Raises LeaseLost, or, with the batch handed over, Draining or what went wrong.
    """
    try:
        with site.holds.holding(claim) as hold:
            journal = site.journals.open(claim)
            journal.load()
            commit = _standing_commit(batch, site) or _make_commit(batch, journal, hold, site)
    except LeaseLost:
        raise
    except FleetError:
        site.claims.release(claim, site.queue)
        raise
    try:
        site.claims.clear(claim)
    except QueueUnavailable as error:
        log.warning("%s is committed; whoever claims it next will clear it: %s", claim.name, error)
    return commit


def _standing_commit(batch: Batch, site: Site) -> Commit | None:
    message = batch.message
    try:
        return read_commit(site.store, message.run, message.segment, message.batch)
    except Missing:
        return None


def _make_commit(batch: Batch, journal: Journal, hold: Hold, site: Site) -> Commit:
    started_at = time.time()
    fates = _answer_all(batch, journal, hold, site)
    if isinstance(fates, Commit):
        return fates
    rows = [fate for fate in fates if isinstance(fate, Row)]
    rejected = [fate for fate in fates if isinstance(fate, Rejection)]
    assert len(rows) + len(rejected) == len(batch.prompts)
    body, sha256 = seal_rows(rows)
    answers = [answer for row in rows for answer in row.answers]
    message, attempt = batch.message, hold.claim.attempt
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
        engine=asyncio.run_coroutine_threadsafe(site.engine.facts(), site.loop).result(),
    )
    return _publish(commit, body, hold, site)


def _answer_all(
    batch: Batch, journal: Journal, hold: Hold, site: Site
) -> list[Row | Rejection] | Commit:
    """Every prompt's fate, in the plan's order; or the commit, if another made it meanwhile."""
    desk = Desk(batch.run.spec, batch.run.chat, site.engine, journal)
    work = asyncio.run_coroutine_threadsafe(_all_fates(batch.prompts, desk, hold), site.loop)
    news: News | None = None
    try:
        while (news := hold.wait()) is not News.ENDED:
            _stop_if_told(news, hold)
            if commit := _look_again(batch, journal, hold, site):
                return commit
        return work.result()
    finally:
        if news is not News.ENDED:
            work.cancel()
            _wait_for_end(hold)


async def _all_fates(prompts: list[Prompt], desk: Desk, hold: Hold) -> list[Row | Rejection]:
    """Ends when every prompt has ended: one that fails leaves the others to be noted."""
    try:
        fates = await asyncio.gather(*(_fate(p, desk) for p in prompts), return_exceptions=True)
    finally:
        hold.tell(News.ENDED)
    ended: list[Row | Rejection] = []
    for fate in fates:
        if isinstance(fate, BaseException):
            raise fate
        ended.append(fate)
    return ended


async def _fate(prompt: Prompt, desk: Desk) -> Row | Rejection:
    try:
        return await roll_out(prompt, desk)
    except PromptRejected as error:
        return Rejection(prompt.key, prompt.id, error.reason, error.detail)


def _stop_if_told(news: News | None, hold: Hold) -> None:
    if news is News.LOST:
        raise LeaseLost(f"{hold.claim.name}: another worker holds it now")
    if news is News.DRAIN:
        raise Draining(f"{hold.claim.name}: this worker is leaving")


def _look_again(batch: Batch, journal: Journal, hold: Hold, site: Site) -> Commit | None:
    """All that is due after a claim, for a claim that was taken again while it was worked on."""
    try:
        journal.load()
        return _standing_commit(batch, site)
    except Transient as error:
        log.warning("%s: will look again: %s", hold.claim.name, error)
        hold.in_doubt = True
        return None


def _wait_for_end(hold: Hold) -> None:
    deadline = time.monotonic() + _ABORT_S
    while (left_s := deadline - time.monotonic()) > 0:
        if hold.wait(left_s) is News.ENDED:
            return


def _publish(commit: Commit, body: bytes, hold: Hold, site: Site) -> Commit:
    """With S3 away, wait for it: the same bytes again and again, while the batch is ours."""
    while True:
        try:
            return publish(site.store, commit, body)
        except Transient as error:
            log.warning("%s: not committed yet: %s", hold.claim.name, error)
        _stop_if_told(hold.wait(_PUBLISH_AGAIN_S), hold)
