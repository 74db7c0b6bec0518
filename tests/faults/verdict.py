"""What a campaign proved: every prompt's fate, every answer's tokens, and what was made again.

Called by campaign.py at its end. The fates come from the system's own audit; that each answer is
the engine's own, from answers.py; what was sampled twice, from the engines' token logs. Whatever
was made again needs a reason among the faults that happened, or a law is broken.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_workers.contract.commit import read_commit, read_rows
from dflash_workers.contract.plan import read_prompts, read_segments
from producer.audit import audit
from tests.faults import schedule
from tests.faults.answers import Answers
from tests.faults.reasons import (
    CUT_S,
    LOST_WITH_REDIS,
    NOT_NOTED,
    REDIS_AWAY,
    UNEXPLAINED,
    describe,
    reason_of,
    was_killed,
)
from tests.faults.token_log import Request, read_requests, remade

if TYPE_CHECKING:
    from tests.faults.campaign import Campaign

MAX_RATIO = 1.05
REDIS_FAULTS = (*REDIS_AWAY, schedule.FLUSHALL)
KILL_SHARE = 0.3


@dataclass
class Report:
    """What came out. `broken_laws` is empty where all is well."""

    seed: int
    num_prompts: int
    num_completed: int
    num_rejected: int
    num_lost: int
    num_doubled: int
    findings: list[str]
    wrong_answers: list[str]
    unexplained: list[str]
    faults: dict[str, int]
    num_left_out: int
    num_kills_full: int
    tokens_made: int
    tokens_in_flight: int  # at the kills
    tokens_made_twice: int
    made_twice_why: dict[str, int]
    regenerated_ratio: float
    wasted_share: float
    recovery_p99_s: float | None  # None: Redis was broken around every kill
    cpu_ms_per_prompt: float
    broken_laws: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}: {self.num_prompts} prompts, {self.num_completed} completed, "
            f"{self.num_rejected} rejected, {self.num_lost} lost, {self.num_doubled} doubled",
            f"faults: {sum(self.faults.values())}, {self.num_kills_full} of them workers killed "
            f"with their engine full; {self.num_left_out} left out",
            *(f"  {count:4}  {kind}" for kind, count in sorted(self.faults.items())),
            f"tokens: {self.tokens_made} made, {self.tokens_in_flight} in flight at the kills, "
            f"{self.tokens_made_twice} made twice (ratio {self.regenerated_ratio:.3f}), "
            f"{self.wasted_share:.2%} wasted",
            *(f"  {count:6}  {why}" for why, count in self.made_twice_why.items()),
            f"recovery p99 {self.recovery_p99_s} s, "
            f"{self.cpu_ms_per_prompt:.1f} ms of a worker's CPU a prompt",
            *(f"BROKEN: {law}" for law in self.broken_laws),
            *self.findings[:20],
            *self.wrong_answers[:20],
            *self.unexplained[:20],
        ]
        return "\n".join(lines)


def judge(campaign: Campaign) -> Report:
    """Look at everything."""
    fleet, happened = campaign.scene.fleet, campaign.happened
    requests = read_requests(engine.token_log for engine in fleet.engines.values())
    requests = [request for request in requests if " prompt " in request.message]
    found = audit(campaign.run.store, campaign.run.spec.run)
    committed_tokens, wrong = _check_answers(campaign)
    twice = remade(requests)
    why, unexplained = Counter[str](), []
    for again in twice:
        reason = reason_of(again, happened)
        why[reason] += again.num_tokens
        if reason == UNEXPLAINED:
            unexplained.append(describe(again))
    made = sum(request.num_made for request in requests)
    in_flight = sum(request.num_made for request in requests if was_killed(request, happened))
    without_notes = why[LOST_WITH_REDIS] + why[NOT_NOTED]
    kinds = Counter(fault.kind for fault in happened)
    doubled = [finding for finding in found.findings if "fates" in finding]
    report = Report(
        seed=campaign.options.seed,
        num_prompts=found.num_prompts,
        num_completed=found.num_completed,
        num_rejected=found.num_rejected,
        num_lost=found.num_waiting + found.num_unproven,
        num_doubled=len(doubled),
        findings=found.findings,
        wrong_answers=wrong,
        unexplained=unexplained,
        faults=dict(kinds),
        num_left_out=len(campaign.left_out),
        num_kills_full=kinds[schedule.KILL],
        tokens_made=made,
        tokens_in_flight=in_flight,
        tokens_made_twice=sum(why.values()),
        made_twice_why=dict(why.most_common()),
        regenerated_ratio=round((sum(why.values()) - without_notes) / max(in_flight, 1), 4),
        wasted_share=round((made - committed_tokens) / max(made, 1), 4),
        recovery_p99_s=_recovery_p99_s(campaign, requests),
        cpu_ms_per_prompt=round(1000 * sum(campaign.cpu_s.values()) / max(found.num_prompts, 1), 2),
    )
    report.broken_laws = list(_broken_laws(report, campaign))
    return report


def _broken_laws(report: Report, campaign: Campaign) -> list[str]:
    num_faults = sum(report.faults.values())
    goodbyes = [code for was_told, code in campaign.exit_codes if was_told]
    laws = {
        f"{report.num_lost} prompts without a fate": report.num_lost == 0,
        f"{report.num_doubled} prompts with several fates": report.num_doubled == 0,
        f"{report.num_rejected} good prompts rejected": report.num_rejected == 0,
        f"the audit found {len(report.findings)} faults": not report.findings,
        f"{len(report.wrong_answers)} answers are not the engine's": not report.wrong_answers,
        f"made again {report.regenerated_ratio} of what was in flight": (
            report.regenerated_ratio <= MAX_RATIO
        ),
        "tokens were made twice for no reason": UNEXPLAINED not in report.made_twice_why,
        f"only {num_faults} of {campaign.options.faults} faults happened": (
            num_faults >= campaign.options.faults
        ),
        "too few kills with a full engine": report.num_kills_full >= KILL_SHARE * num_faults,
        f"workers that were told to go left with {goodbyes}": not any(goodbyes),
    }
    return [law for law, holds in laws.items() if not holds]


def _check_answers(campaign: Campaign) -> tuple[int, list[str]]:
    """Output tokens in commits, and every committed answer that isn't the engine's."""
    store, run = campaign.run.store, campaign.run.spec.run
    answers = Answers(campaign.scene.fleet.place.model_dir)
    num_tokens, wrong = 0, []
    done = campaign.reconciler.ledger
    done.refresh()
    waiting = {(message.segment, message.batch) for message in done.uncommitted()}
    for segment in read_segments(store, run):
        for batch in segment.batches:
            if (segment.number, batch.batch) in waiting:
                continue
            for row in read_rows(store, read_commit(store, run, segment.number, batch.batch)):
                for answer in row.answers:
                    num_tokens += len(answer.output_ids)
                    if answer.output_ids != answers.read(answer.input_ids).answer_ids:
                        wrong.append(f"{row.id}, turn {answer.turn}: not what was sampled")
    return num_tokens, wrong


def _recovery_p99_s(campaign: Campaign, requests: list[Request]) -> float | None:
    """From a worker's kill to the next request of each batch that it held, with Redis there."""
    batches = _batches_of(campaign)
    waits = []
    for fault in campaign.happened:
        is_redis_well = not any(
            other.kind in REDIS_FAULTS and -8 < other.at_s - fault.at_s < 18
            for other in campaign.happened
        )
        if fault.kind != schedule.KILL or not is_redis_well:
            continue
        cut = [
            r
            for r in requests
            if r.engine == fault.slot
            and not r.is_answered
            and r.started_s <= fault.at_s <= r.moved_s + CUT_S
        ]
        for batch in {batches[_number(request)] for request in cut}:
            later = (
                r.started_s
                for r in requests
                if r.started_s > fault.at_s and batches[_number(r)] == batch
            )
            if (first_s := next(later, None)) is not None:
                waits.append(first_s - fault.at_s)
    waits.sort()
    return round(waits[int(0.99 * (len(waits) - 1))], 2) if waits else None


def _batches_of(campaign: Campaign) -> dict[int, str]:
    """The batch of each prompt, by the prompt's number."""
    store, run = campaign.run.store, campaign.run.spec.run
    return {
        int(prompt.id.removeprefix("p")): batch.batch
        for segment in read_segments(store, run)
        for batch in segment.batches
        for prompt in read_prompts(store, segment, batch)
    }


def _number(request: Request) -> int:
    found = re.search(r" prompt (\d+) ", request.message)
    assert found
    return int(found[1])
