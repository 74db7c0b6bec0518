"""A run's figures over time, and how they are distributed: arithmetic on what gathering read.

Used by page.py. Commits come in bursts and their prompts don't: a batch counts as if it had been
worked off evenly from claim to commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from dflash_workers.contract.events import SAMPLE, Event
from dflash_workers.contract.records import Json
from trainer.report.gathering import Done, Drafted, Facts

Points = list[tuple[float, float]]  # hours since the run's start, value

NUM_PARTS = 120  # of the run's time
_NUM_BINS = 16


def rates(facts: Facts) -> tuple[Points, Points, Points]:
    """Over the run's time: prompts per minute, output tokens per second, workers that had work."""
    part_s = max((facts.to_s - facts.from_s) / NUM_PARTS, 1e-3)
    prompts, tokens = [0.0] * NUM_PARTS, [0.0] * NUM_PARTS
    for done in facts.done:
        for number, share in _shares(done, facts.from_s, part_s):
            prompts[number] += done.num_prompts * share
            tokens[number] += done.output_tokens * share
    workers = [
        sum(
            any(a < end_s and b > end_s - part_s for a, b in spans)
            for spans in facts.busy.spans.values()
        )
        for end_s in (facts.from_s + (n + 1) * part_s for n in range(NUM_PARTS))
    ]
    hours = [(number + 0.5) * part_s / 3600 for number in range(NUM_PARTS)]
    return (
        [(x, y * 60 / part_s) for x, y in zip(hours, prompts, strict=True)],
        [(x, y / part_s) for x, y in zip(hours, tokens, strict=True)],
        [(x, float(y)) for x, y in zip(hours, workers, strict=True)],
    )


def _shares(done: Done, start_s: float, part_s: float) -> Iterable[tuple[int, float]]:
    """The parts of the run's time that it lies in, and how much of it in each."""
    first = min(int((done.from_s - start_s) / part_s), NUM_PARTS - 1)
    last = min(int((done.to_s - start_s) / part_s), NUM_PARTS - 1)
    length_s = done.to_s - done.from_s
    if length_s <= 0 or first == last:
        yield last, 1.0
        return
    for number in range(first, last + 1):
        begin_s = max(done.from_s, start_s + number * part_s)
        end_s = min(done.to_s, start_s + (number + 1) * part_s) if number < last else done.to_s
        yield number, max(end_s - begin_s, 0.0) / length_s


def sampled(events: Sequence[Event], start_s: float, name: str, over: str = "") -> Points:
    """A figure of the fleet, once a minute as the observer saw it; `over`: divided by that one."""
    points = []
    for event in events:
        value, base = event.facts.get(name), event.facts.get(over, 1.0) if over else 1.0
        if event.kind == SAMPLE and value is not None and base:
            points.append(((event.at_s - start_s) / 3600, float(value) / float(base)))
    return points


def mean_in_flight(facts: Facts) -> float | None:
    """Requests in an engine while its worker had a batch, by Little's law: the time that answers
    took, scaled from the sampled ones to all tokens, over the workers' busy time.
    """
    num_tokens = sum(facts.answers.output_tokens)
    busy_s = sum(b - a for spans in facts.busy.spans.values() for a, b in spans)
    if not num_tokens or busy_s <= 0:
        return None
    taken_s = sum(facts.answers.latencies_s) * facts.output_tokens / num_tokens
    return taken_s / busy_s


def accept_lengths(drafted: Sequence[Drafted], start_s: float) -> Points:
    """The mean of each commit's answers."""
    by_time: dict[float, list[float]] = {}
    for answer in drafted:
        by_time.setdefault(answer.at_s, []).append(answer.accept_length)
    return [((at - start_s) / 3600, fmean(lengths)) for at, lengths in sorted(by_time.items())]


def curve(steps: Sequence[Json], name: str) -> Points:
    """A trainer's figure by step; steps that don't tell it are left out."""
    return [
        (float(step["step"]), float(step[name])) for step in steps if step.get(name) is not None
    ]


def binned(values: Sequence[float], unit: str = "") -> dict[str, int]:
    """Counts in bins that double, from the smallest value's to the largest's."""
    counts: dict[int, int] = {}
    for value in values:
        counts[_bin(value)] = counts.get(_bin(value), 0) + 1
    if not counts:
        return {}
    first = max(min(counts), max(counts) - _NUM_BINS + 1)
    under = sum(count for number, count in counts.items() if number < first)
    named = {_label(n, unit): counts.get(n, 0) for n in range(first, max(counts) + 1)}
    return ({f"< {2.0 ** (first - 1):g}{unit}": under} if under else {}) | named


def _bin(value: float) -> int:
    """The power of two at or above it."""
    return math.ceil(math.log2(value)) if value > 0 else -20


def _label(number: int, unit: str) -> str:
    return f"{2.0**number:g}{unit}"
