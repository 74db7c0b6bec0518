"""From what happened to a Result: the oracle's look, what was made again and why, figures, laws.

Called by __main__.py when the course is over, with S3 still there and everything else stopped.
The fates come from oracle.py, and once more from the product's own audit; what was sampled twice
from the engines' token log. Whatever was made again needs a reason among the faults that happened.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from benchmarks.campaign import kinds, reasons
from benchmarks.campaign.commands import AuditCommand
from benchmarks.campaign.course import Course
from benchmarks.campaign.engine_log import EngineLog
from benchmarks.campaign.fleet import BUCKET
from benchmarks.campaign.oracle import Bucket, Looked, Oracle, read_batches
from benchmarks.campaign.recovery import look_at
from benchmarks.campaign.result import FaultSeen
from benchmarks.campaign.result import Oracle as OracleSeen
from benchmarks.campaign.saying import say
from benchmarks.simulated.answers import Answers
from benchmarks.simulated.lengths import Lengths

SAY_EVERY_S = 10.0
MAX_UNEXPLAINED = 20  # kept for people


@dataclass
class Remaking:
    """Tokens that were sampled twice, by why."""

    why: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)  # the first of them, for people

    @property
    def num_counted(self) -> int:
        """Without what Redis lost: what the law is about."""
        return sum(n for why, n in self.why.items() if why not in reasons.WITHOUT_NOTES)

    def num_at(self, kind: str) -> int:
        """What ran when such a fault came, and had to be made again."""
        return self.why[reasons.in_flight_at(kind)]


@dataclass
class Found:
    """All that was looked up once the course was over."""

    looked: Looked
    audit: dict[str, Any]  # the command's object
    remaking: Remaking
    faults: list[FaultSeen]
    num_made: int  # tokens that the engines sampled
    num_requests: int
    oracle_s: float
    audit_s: float

    @property
    def num_in_flight_at_kills(self) -> int:
        """Tokens of requests that a kill ended."""
        return self.in_flight_at(*reasons.KILLS)

    def in_flight_at(self, *wanted: str) -> int:
        """Tokens of requests that such faults ended."""
        return sum(fault.tokens_in_flight for fault in self.faults if fault.kind in wanted)

    @property
    def regenerated_ratio(self) -> float:
        """Made again of what was in flight, without what Redis lost."""
        return self.remaking.num_counted / max(self.num_in_flight_at_kills, 1)

    @property
    def wasted_share(self) -> float | None:
        """Of what ran in workers that were told to go; None: none was."""
        in_flight = self.in_flight_at(kinds.WORKER_TOLD)
        return self.remaking.num_at(kinds.WORKER_TOLD) / in_flight if in_flight else None

    def seen(self) -> OracleSeen:
        """For the result."""
        looked = self.looked
        counts = {k: v for k, v in self.audit.items() if isinstance(v, int)}
        return OracleSeen(
            num_planned=len(looked.fates),
            num_completed=looked.num_completed,
            num_rejected=looked.num_rejected,
            num_lost=looked.num_lost,
            num_doubled=looked.num_doubled,
            num_wrong=looked.num_wrong,
            num_token_rows=looked.num_token_rows or None,
            num_output_tokens=looked.num_output_tokens,
            num_made_tokens=self.num_made,
            num_made_again=self.remaking.why.total(),
            made_again_by=dict(self.remaking.why.most_common()),
            findings=[*looked.findings, *self.audit["findings"][:20], *self.remaking.unexplained],
            audit=counts | {"findings": len(self.audit["findings"])},
        )


def look_at_everything(course: Course) -> Found:
    """S3, the token log, and the audit's own word."""
    fleet = course.fleet
    log = EngineLog(fleet.folder / "engines.sqlite")
    with AuditCommand(fleet) as audit, closing(log):
        slots = dict(zip(map(str, fleet.engines.ports), fleet.slots, strict=True))
        log.read(fleet.engines.token_log, slots)
        say(f"{log.num_requests} requests in the engines' log")
        began_s = time.monotonic()
        looked = _look_at_store(course, log)
        log.index()
        oracle_s = time.monotonic() - began_s
        faults = [look_at(f, course.happened, log, course.zero_at) for f in course.happened]
        remaking = _what_was_remade(course, log)
        say("waiting for the audit")
        found, audit_s = audit.wait()
        made, requests = log.num_made, log.num_requests
        return Found(looked, found, remaking, faults, made, requests, oracle_s, audit_s)


def _look_at_store(course: Course, log: EngineLog) -> Looked:
    configuration, fleet = course.configuration, course.fleet
    asked = configuration.answers
    lengths = Lengths(asked.mean_tokens, asked.variation, asked.tail_share)
    oracle = Oracle(
        course.producer.source,
        course.producer.num_prompts,
        Answers(fleet.model_dir, lengths),
        Tokenizer.from_file(str(fleet.model_dir / "tokenizer.json")),
        asked.max_tokens,
    )
    login = fleet.s3_login
    where = Bucket(login.endpoint, login.access_key, login.secret_key, BUCKET, fleet.run)
    has_tokenizers = configuration.tokenizers.count > 0
    said_s = time.monotonic()
    for batch in read_batches(where):
        questions = oracle.look_at(batch, has_tokenizers=has_tokenizers)
        log.add_answers(questions, batch.name)
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"oracle: {oracle.looked.num_batches} batches looked at")
    return oracle.looked


def _what_was_remade(course: Course, log: EngineLog) -> Remaking:
    remaking = Remaking()
    for again in log.remade():
        if not log.batches_of(again.request.question):
            continue  # a worker's own question, when it starts
        reason = reasons.reason_of(again, course.happened)
        remaking.why[reason] += again.num_tokens
        if reason == reasons.UNEXPLAINED and len(remaking.unexplained) < MAX_UNEXPLAINED:
            remaking.unexplained.append(reasons.describe(again))
    return remaking


def facts_of(course: Course, found: Found) -> dict[str, Any]:
    """For people."""
    views, looked = course.views, found.looked
    fills = list(views.fills.values())
    facts: dict[str, Any] = {
        "prompts": len(looked.fates),
        "batches": looked.num_batches,
        "seconds from the first worker to the last commit": round(course.done_s, 1),
        "output tokens committed": looked.num_output_tokens,
        "output tokens made by the engines": found.num_made,
        "requests": found.num_requests,
        "longest look of the reconciler (s)": round(course.longest_look_s, 2),
        "audit (s)": round(found.audit_s, 1),
        "oracle (s)": round(found.oracle_s, 1),
        "calls of the producer that failed and were repeated": course.producer.num_failed,
        "exit codes of workers that were told to go": dict(Counter(map(str, course.goodbyes))),
        "workers that died by themselves": len(course.crashed),
    }
    if fills and not course.happened:
        facts["fill of the emptiest engine"] = round(min(fills), 4)
    if views.eta:
        facts["end foretold (s)"] = round(views.eta.end_s, 1)
        facts["foretold at (s)"] = round(views.eta.at_s, 1)
    for name, seconds in course.timed.items():
        facts[f"{name} (s)"] = round(seconds, 2)
    return facts
