"""What a campaign proved: every prompt's fate, every answer's tokens, and what was made again.

Called by campaign.py at its end. The fates come from the system's own audit; that each answer is
the engine's own, from answers.py; what was sampled twice, from the engines' token logs. Whatever
was made again needs a reason among the faults that happened, or a law is broken.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_workers.contract.commit import read_commit, read_rows
from dflash_workers.contract.plan import read_prompts, read_segments
from producer.audit import audit
from tests.faults import schedule
from tests.faults.answers import Answers
from tests.faults.reasons import (
    UNEXPLAINED,
    WITHOUT_NOTES,
    describe,
    reason_of,
    was_killed,
)
from tests.faults.recovery import Recovery, recovery
from tests.faults.token_log import Request, read_requests, remade

if TYPE_CHECKING:
    from tests.faults.campaign import Campaign

MAX_RATIO = 1.05
KILL_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Twice:
    """Tokens that were sampled twice, by why."""

    num_in_flight: int  # tokens that ran in an engine when it or its worker was killed
    why: dict[str, int]  # why -> tokens made again
    unexplained: list[str]  # for people

    @property
    def ratio(self) -> float:
        """Made again of what was in flight; without what Redis lost: the law."""
        counted = sum(count for why, count in self.why.items() if why not in WITHOUT_NOTES)
        return round(counted / max(self.num_in_flight, 1), 4)

    @property
    def ratio_of_all(self) -> float:
        """With what Redis lost."""
        return round(sum(self.why.values()) / max(self.num_in_flight, 1), 4)

    def lines(self) -> list[str]:
        """For people."""
        counted = {why: count for why, count in self.why.items() if why not in WITHOUT_NOTES}
        others = {why: count for why, count in self.why.items() if why in WITHOUT_NOTES}
        return [
            f"made twice / in flight at the kills: {sum(counted.values())} / "
            f"{self.num_in_flight} = {self.ratio:.3f}, at most {MAX_RATIO}; it counts",
            *(f"  {count:6}  {why}" for why, count in counted.items()),
            "  and not what was noted, or could not be, when Redis lost its data or was away; "
            f"with that it is {self.ratio_of_all:.3f}",
            *(f"  {count:6}  {why}" for why, count in others.items()),
        ]


@dataclass
class Report:
    """What came out. `broken_laws` is empty where all is well."""

    command: str  # that draws the same faults again
    num_prompts: int
    num_completed: int
    num_rejected: int
    num_lost: int
    num_doubled: int
    findings: list[str]
    wrong_answers: list[str]
    faults: dict[str, int]
    left_out: list[str]
    num_kills_full: int
    tokens_made: int
    wasted_share: float
    twice: Twice
    recovery: Recovery
    cpu_ms_per_prompt: float
    broken_laws: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self) | {
            "regenerated_ratio": self.twice.ratio,
            "regenerated_ratio_of_all": self.twice.ratio_of_all,
            "recovery_p99_s": self.recovery.p99_s,
        }

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.num_prompts} prompts: {self.num_completed} completed, "
            f"{self.num_rejected} rejected, {self.num_lost} lost, {self.num_doubled} doubled",
            f"faults: {sum(self.faults.values())}, {self.num_kills_full} of them workers killed "
            f"with their engine full; left out: {self.left_out or 'none'}",
            *(f"  {count:4}  {kind}" for kind, count in sorted(self.faults.items())),
            f"tokens: {self.tokens_made} made, {self.wasted_share:.2%} of them wasted",
            *self.twice.lines(),
            self.recovery.text(),
            f"{self.cpu_ms_per_prompt:.1f} ms of a worker's CPU a prompt",
            *(f"BROKEN: {law}" for law in self.broken_laws),
            *self.findings[:20],
            *self.wrong_answers[:20],
            *self.twice.unexplained[:20],
            f"the same faults again: {self.command}",
        ]
        return "\n".join(lines)


def judge(campaign: Campaign) -> Report:
    """Look at everything."""
    requests = _requests(campaign)
    found = audit(campaign.run.store, campaign.run.spec.run)
    committed_tokens, wrong = _check_answers(campaign)
    made = sum(request.num_made for request in requests)
    kinds = Counter(fault.kind for fault in campaign.happened)
    report = Report(
        command=campaign.options.command,
        num_prompts=found.num_prompts,
        num_completed=found.num_completed,
        num_rejected=found.num_rejected,
        num_lost=found.num_waiting + found.num_unproven,
        num_doubled=sum("fates" in finding for finding in found.findings),
        findings=found.findings,
        wrong_answers=wrong,
        faults=dict(kinds),
        left_out=[fault.kind for fault in campaign.left_out],
        num_kills_full=kinds[schedule.KILL],
        tokens_made=made,
        wasted_share=round((made - committed_tokens) / max(made, 1), 4),
        twice=_made_twice(campaign, requests),
        recovery=recovery(campaign.happened, requests, _batches_of(campaign)),
        cpu_ms_per_prompt=round(1000 * sum(campaign.cpu_s.values()) / max(found.num_prompts, 1), 2),
    )
    report.broken_laws = list(_broken_laws(report, campaign))
    return report


def _requests(campaign: Campaign) -> list[Request]:
    logs = (engine.token_log for engine in campaign.scene.fleet.engines.values())
    return [request for request in read_requests(logs) if " prompt " in request.message]


def _made_twice(campaign: Campaign, requests: list[Request]) -> Twice:
    happened = campaign.happened
    why, unexplained = Counter[str](), []
    for again in remade(requests):
        reason = reason_of(again, happened)
        why[reason] += again.num_tokens
        if reason == UNEXPLAINED:
            unexplained.append(describe(again))
    in_flight = sum(request.num_made for request in requests if was_killed(request, happened))
    return Twice(in_flight, dict(why.most_common()), unexplained)


def _broken_laws(report: Report, campaign: Campaign) -> list[str]:
    num_faults = sum(report.faults.values())
    goodbyes = [code for was_told, code in campaign.exit_codes if was_told]
    laws = {
        f"{report.num_lost} prompts without a fate": report.num_lost == 0,
        f"{report.num_doubled} prompts with several fates": report.num_doubled == 0,
        f"{report.num_rejected} good prompts rejected": report.num_rejected == 0,
        f"the audit found {len(report.findings)} faults": not report.findings,
        f"{len(report.wrong_answers)} answers are not the engine's": not report.wrong_answers,
        f"made again {report.twice.ratio} of what was in flight": report.twice.ratio <= MAX_RATIO,
        "tokens were made twice for no reason": not report.twice.unexplained,
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


def _batches_of(campaign: Campaign) -> dict[int, str]:
    """The batch of each prompt, by the prompt's number."""
    store, run = campaign.run.store, campaign.run.spec.run
    return {
        int(prompt.id.removeprefix("p")): batch.batch
        for segment in read_segments(store, run)
        for batch in segment.batches
        for prompt in read_prompts(store, segment, batch)
    }
