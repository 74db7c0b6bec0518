"""How many drafts are accepted, as a mean with an interval, over all and by what is known of them.

Called by evaluate.py with what speculate.py counted for each prompt. An accept length is tokens per
verify step, the target's own token included: 1.0 is no help at all. Prompts are the units: each
counts once, however long its reply, and intervals are those of the mean over prompts, by bootstrap.
Invariant: the same counts give the same figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

NUM_RESAMPLES = 10_000
PICKS_AT_ONCE = 1_000_000  # of the bootstrap: 16 MB

THINKING, ANSWER = "thinking", "answer"


@dataclass(frozen=True, slots=True)
class Counted:
    """A prompt's reply, step by step."""

    source: str  # where the prompt came from
    turn: int
    tokens_by_step: Sequence[int]
    hits_by_step: Sequence[int]  # drafts, whether or not the reply ended there
    num_thinking: int  # of the reply's tokens, the one that ends the thinking included


@dataclass(frozen=True, slots=True)
class Mean:
    """Over prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accept lengths, but for `by_place`."""

    overall: Mean
    over_sources: float  # mean of the sources' means
    by_source: dict[str, Mean]
    by_turn: dict[str, Mean]
    by_part: dict[str, Mean]  # "thinking", "answer": of the steps that begin there
    # "1" to the last place that ever hit: the share of steps in which the drafts up to it do.
    by_place: dict[str, Mean]


def acceptance(counted: Sequence[Counted]) -> Acceptance:
    """Of prompts that all have a step."""
    by_source = _grouped(counted, lambda c: c.source)
    last_hit = max(hits for c in counted for hits in c.hits_by_step)
    return Acceptance(
        overall=mean_over(_length(c.tokens_by_step) for c in counted),
        over_sources=float(np.mean([m.mean for m in by_source.values()])),
        by_source=by_source,
        by_turn=_grouped(counted, lambda c: str(c.turn)),
        by_part=_by_part(counted),
        by_place={
            str(k): mean_over(_share_of_hits(c, k) for c in counted) for k in range(1, last_hit + 1)
        },
    )


def mean_over(values: Iterable[float]) -> Mean:
    """Of one value for each prompt."""
    found = np.fromiter(values, float)
    return Mean(float(found.mean()), *bootstrap_interval(found), len(found))


def bootstrap_interval(values: Values) -> tuple[float, float]:
    """95 % interval of the mean; the same input gives the same interval."""
    random = np.random.default_rng(0)
    size = max(1, PICKS_AT_ONCE // len(values))
    means: list[Values] = []
    for start in range(0, NUM_RESAMPLES, size):
        num = min(size, NUM_RESAMPLES - start)
        means.append(values[random.integers(len(values), size=(num, len(values)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def _grouped(counted: Sequence[Counted], name: Callable[[Counted], str]) -> dict[str, Mean]:
    groups: dict[str, list[float]] = defaultdict(list)
    for one in counted:
        groups[name(one)].append(_length(one.tokens_by_step))
    return {key: mean_over(groups[key]) for key in sorted(groups)}


def _by_part(counted: Sequence[Counted]) -> dict[str, Mean]:
    lengths: dict[str, list[float]] = {THINKING: [], ANSWER: []}
    for one in counted:
        # A reply's first token comes with the prompt; a step begins behind those before it.
        begins = 1 + np.cumsum([0, *one.tokens_by_step[:-1]])
        is_thinking = begins < one.num_thinking
        for part, chosen in ((THINKING, is_thinking), (ANSWER, ~is_thinking)):
            if chosen.any():
                lengths[part].append(float(np.asarray(one.tokens_by_step)[chosen].mean()))
    return {part: mean_over(values) for part, values in lengths.items() if values}


def _length(tokens_by_step: Sequence[int]) -> float:
    return sum(tokens_by_step) / len(tokens_by_step)


def _share_of_hits(counted: Counted, place: int) -> float:
    """Of the steps: those in which the draft at that place, and all before it, hit."""
    return sum(hits >= place for hits in counted.hits_by_step) / len(counted.hits_by_step)
