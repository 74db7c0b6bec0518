"""Rejected prompts -> planned again, one generation higher.

Takes the prompts whose latest fate is a rejection from <- rejected.py; plans them through plan.py's
log, so that of any number of retries at once each prompt is planned by one; sends -> the queue what
has no hint. The same command again finds them waiting, plans nothing, and sends what got lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.contract.store import Store
from producer.candidates import Candidate, candidate_of
from producer.drafts import PlanOptions
from producer.enqueue import queue_of, send_planned
from producer.fingerprint import check_sampling
from producer.ledger import Ledger
from producer.plan import plan
from producer.rejected import RejectedOfBatch, read_rejected
from producer.segments import read_log


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """Whom to ask again, and how."""

    reasons: frozenset[str]
    sampling: Json = field(default_factory=dict)  # overrides; see records.OVERRIDABLE
    batch_size: int = 16  # prompts; few, because what was rejected once may take long
    dry_run: bool = False  # count, write and send nothing


@dataclass(slots=True)
class RetryReport:
    """What one call did."""

    num_rejected: int = 0  # prompts whose latest fate is a rejection for one of the reasons
    reasons: dict[str, int] = field(default_factory=dict)  # of these
    num_planned: int = 0  # of these; the others were planned by another retry meanwhile
    num_batches: int = 0
    num_sent: int = 0  # hints, those that earlier calls left unsent included


def retry(store: Store, hints: Hints, spec: RunSpec, options: RetryOptions) -> RetryReport:
    """Plan the rejected prompts again and send their hints. Safe to repeat, and to race.

    Raises BadInput for overrides out of the target's bounds, Conflict for a
    cancelled one.
    """
    check_sampling(spec.sampling.overridden(options.sampling), spec.target.context_len)
    if Control(store, spec.run).state() is RunState.CANCELLED:
        raise Conflict(f"run {spec.run!r} is cancelled: nothing of it is answered any more")
    rejected = list(read_rejected(store, spec.run, options.reasons))
    reasons = Counter(r.reason for batch in rejected for r in batch.rejections.values())
    report = RetryReport(reasons.total(), dict(reasons))
    if options.dry_run:
        return report
    for generation in sorted({batch.batch.generation for batch in rejected}):
        again = [batch for batch in rejected if batch.batch.generation == generation]
        _plan_again(store, spec.run, again, options, report)
    report.num_sent = send_planned(Ledger(store, spec.run), hints, queue_of(spec))
    return report


def _plan_again(
    store: Store,
    run: str,
    rejected: list[RejectedOfBatch],
    options: RetryOptions,
    report: RetryReport,
) -> None:
    """Plan prompts of one generation in the next."""
    log = read_log(store, run)
    generation = rejected[0].batch.generation + 1
    planned = plan(
        log,
        _candidates(store, rejected, generation, options.sampling),
        PlanOptions(
            batch_size=options.batch_size,
            generation=generation,
            sampling=options.sampling,
            notes={"retry": sorted(options.reasons)},
        ),
    )
    report.num_planned += planned.num_planned
    report.num_batches += planned.num_batches


def _candidates(
    store: Store, rejected: list[RejectedOfBatch], generation: int, sampling: Json
) -> Iterator[Candidate]:
    for item in rejected:
        digests = dict(zip(item.batch.prompt_keys, item.batch.content_digests, strict=True))
        for prompt in item.prompts(store):
            again = replace(prompt, generation=generation, sampling=prompt.sampling | sampling)
            yield candidate_of(again, digests[prompt.key])
