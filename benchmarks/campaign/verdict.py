"""Figures and laws of a campaign, from what conclude.py found.

Called by __main__.py. The laws hold in every campaign, whatever went wrong in it; goals are the
campaign's own, said in its file. A figure that could not be measured is left out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.campaign import kinds
from benchmarks.campaign.conclude import Found
from benchmarks.campaign.configuration import Goals
from benchmarks.campaign.course import Course
from benchmarks.campaign.recovery import quantile
from benchmarks.campaign.result import ProcessSeen, Stage
from benchmarks.campaign.watching import worst_slope
from benchmarks.figures import Figure

MAX_RATIO = 1.05
MAX_WASTED = 0.01
KILL_SHARE = 0.3  # of all faults: workers killed or told to go with their engine full
FEW_FAULTS = 10  # of fewer, shares say nothing
LONG_LIFE_S = 300.0  # in less a process still grows to its working size


def figures_of(
    course: Course, found: Found, stages: Sequence[Stage], processes: Sequence[ProcessSeen]
) -> list[Figure]:
    """All that were measured."""
    figures = [*_of_faults(course, found), *_of_pace(course, found), *_of_cost(course, stages)]
    goals = course.configuration.goals
    if worst := worst_slope(filter(is_long_lived, processes)):
        slope, goal = worst.slope_mb_per_min or 0.0, goals.rss_slope_mb_per_min or None
        figures.append(_figure("rss_slope_mb_per_min", slope, goal, "MB/min"))
    return figures


def broken_laws(course: Course, found: Found, is_done: bool) -> list[str]:
    """Empty where all is well."""
    looked, audit = found.looked, found.audit
    num_audited, num_findings = audit["num_completed"], len(audit["findings"])
    met = Counter(fault.kind for fault in course.happened)
    num_faults, num_gone = met.total(), sum(met[kind] for kind in kinds.WORKERS_GO)
    wasted = found.wasted_share or 0.0
    laws = {
        "the run never came to its end": is_done,
        f"{looked.num_lost} prompts without a fate": looked.num_lost == 0,
        f"{looked.num_doubled} prompts with several fates": looked.num_doubled == 0,
        f"{looked.num_rejected} good prompts rejected": looked.num_rejected == 0,
        f"{looked.num_wrong} answers or samples are wrong": looked.num_wrong == 0,
        f"the oracle found {len(looked.findings)} faults": not looked.findings,
        f"the audit found {num_findings} faults": not num_findings,
        f"the audit counts {num_audited} completed prompts, the oracle {looked.num_completed}": (
            num_audited == looked.num_completed
        ),
        f"{looked.num_not_tokenized} batches without token shards": looked.num_not_tokenized == 0,
        f"made again {found.regenerated_ratio:.3f} of what was in flight": (
            found.regenerated_ratio <= MAX_RATIO
        ),
        f"{wasted:.2%} of what ran at a notice was made again": (
            wasted <= MAX_WASTED or met[kinds.WORKER_TOLD] < FEW_FAULTS
        ),
        "tokens were made twice for no reason": not found.remaking.unexplained,
        f"{len(course.left_out)} faults were left out": not course.left_out,
        f"only {num_gone} of {num_faults} faults were workers that went with a full engine": (
            num_gone >= KILL_SHARE * num_faults
        ),
        f"workers that were told to go left with {course.goodbyes}": not any(course.goodbyes),
        f"{len(course.goodbyes)} of {met[kinds.WORKER_TOLD]} workers that were told to go went": (
            len(course.goodbyes) == met[kinds.WORKER_TOLD]
        ),
        f"workers died by themselves: {course.crashed}": not course.crashed,
    }
    return [law for law, holds in laws.items() if not holds]


def unmeasured_goals(goals: Goals, figures: Sequence[Figure]) -> list[str]:
    """What the campaign was to show, and didn't look at."""
    measured = {figure.figure for figure in figures}
    wanted = [name for name, goal in dataclasses.asdict(goals).items() if goal]
    return [f"{name} was not measured" for name in wanted if f"campaign.{name}" not in measured]


def is_long_lived(process: ProcessSeen) -> bool:
    """Whether the growth of its memory says anything."""
    times_s = process.rss.t_s
    return bool(times_s) and times_s[-1] - times_s[0] >= LONG_LIFE_S


def _of_faults(course: Course, found: Found) -> Iterator[Figure]:
    looked, goals = found.looked, course.configuration.goals
    yield _figure("faults", len(course.happened), None, "faults", better="higher")
    yield _figure("lost", looked.num_lost, 0, "prompts")
    yield _figure("doubled", looked.num_doubled, 0, "prompts")
    yield _figure("wrong", looked.num_wrong, 0, "answers")
    if found.num_in_flight_at_kills:
        yield _figure("regenerated_ratio", found.regenerated_ratio, MAX_RATIO, "ratio")
        ratio = found.remaking.why.total() / found.num_in_flight_at_kills
        yield _figure("regenerated_ratio_with_what_redis_lost", ratio, None, "ratio")
    if found.wasted_share is not None:
        yield _figure("wasted_share", found.wasted_share, MAX_WASTED, "ratio")
    waits_s = [
        wait_s
        for fault in found.faults
        if fault.kind == kinds.WORKER_KILLED and fault.is_alone
        for wait_s in fault.recovery_s
    ]
    if (p99_s := quantile(waits_s, 0.99)) is not None:
        yield _figure("recovery_p99_s", p99_s, goals.recovery_p99_s or None, "s")


def _of_pace(course: Course, found: Found) -> Iterator[Figure]:
    views, goals = course.views, course.configuration.goals
    if course.done_s:
        rate = found.looked.num_completed / course.done_s
        yield _figure("prompts_per_s", rate, None, "prompts/s", better="higher")
    if views.fills and not course.happened:
        fill = sum(views.fills.values()) / len(views.fills)
        yield _figure("fill", fill, goals.fill or None, "ratio", better="higher")
    if views.eta and course.done_s:
        error = abs(views.eta.end_s - course.done_s) / course.done_s
        yield _figure("eta_error", error, goals.eta_error or None, "ratio")
    if peak_mb := views.peak_redis_mb:
        yield _figure("redis_mb", peak_mb, goals.redis_mb or None, "MB")
    for name, seconds in course.timed.items():
        yield _figure(f"{name}_s", seconds, None, "s")


def _of_cost(course: Course, stages: Sequence[Stage]) -> Iterator[Figure]:
    goal = course.configuration.goals.cpu_ms_per_prompt or None
    cost = {stage.kind: stage.cpu_ms_per_prompt for stage in stages}
    ours = cost.get("worker", 0.0) + cost.get("tokenizer", 0.0)
    yield _figure("cpu_ms_per_prompt", ours, goal, "ms")
    for kind, cpu_ms in cost.items():
        yield _figure(f"cpu_ms_per_prompt_{kind}", cpu_ms, None, "ms")


def _figure(
    name: str, value: float, goal: float | None, unit: str, *, better: str = "lower"
) -> Figure:
    return Figure(f"campaign.{name}", round(value, 5), goal, better, unit)
