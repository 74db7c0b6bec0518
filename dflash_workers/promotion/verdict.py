"""Whether a drafter makes the fleet faster: a rule over tokens per second, and nothing else.

Fed by -> observing with windows of time in which the engine on trial and others were full, asked by
-> promoter. The figure of a window is the log of the engine's rate over the mean rate of the others
in the same seconds: what work comes moves both sides alike. The same figure from before the trial
is taken off, because two GPUs need not be equally fast. What is left is the drafter's gain.

The rule: promoted where the gain is at least `gain` with `confidence`; refused where it is surely
less, or where it could not be shown within `max_requests`. The data are looked at `num_looks` times
and each look takes an equal share of the error, so that looking early costs no honesty (Bonferroni;
Welch's interval for two samples; quantiles of Student's t by Abramowitz and Stegun, 26.7.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist, fmean, variance

from dflash_workers.contract.errors import BadInput


@dataclass(frozen=True, slots=True)
class Rule:
    """When a trial is decided, and how long it may take."""

    gain: float = 0.03  # at least so much faster, as a share
    confidence: float = 0.95
    max_requests: int = 2000  # of the engine on trial
    num_looks: int = 5
    window_s: float = 10.0
    min_windows: int = 12  # of each sample; before that nothing is decided
    settle_s: float = 20.0  # after the engine is up: its caches fill
    max_s: float = 3600.0  # a trial that finds no work ends

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1 or self.gain < 0 or self.window_s <= 0:
            raise BadInput("gain >= 0, 0 < confidence < 1 and window_s > 0 are wanted")
        if self.num_looks < 1 or self.max_requests < self.num_looks or self.min_windows < 3:
            raise BadInput("num_looks >= 1, max_requests >= num_looks, min_windows >= 3 are wanted")

    def is_look_due(self, num_looked: int, num_requests: int) -> bool:
        """Whether the next look's share of the requests has ended."""
        return num_requests * self.num_looks >= self.max_requests * (num_looked + 1)


class Outcome(StrEnum):
    """What a look says."""

    FASTER = "faster"
    NOT_FASTER = "not faster"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Gain:
    """Of the trial over what was served before, as shares: 0.1 is a tenth faster."""

    mean: float
    low: float
    high: float
    num_windows: int


def judge(gain: Gain, rule: Rule, *, is_last: bool) -> Outcome:
    """What one look says; the last one leaves nothing open."""
    if gain.low >= rule.gain:
        return Outcome.FASTER
    if gain.high < rule.gain or is_last:
        return Outcome.NOT_FASTER
    return Outcome.OPEN


def estimate_gain(before: Sequence[float], during: Sequence[float], rule: Rule) -> Gain:
    """From the windows' logs of rate ratios; at least three of each."""
    difference = fmean(during) - fmean(before)
    of_before, of_during = variance(before) / len(before), variance(during) / len(during)
    error = math.sqrt(of_before + of_during)
    freedom = _freedom(of_before, len(before)) + _freedom(of_during, len(during))
    share = (1 - rule.confidence) / rule.num_looks
    degrees = (of_before + of_during) ** 2 / freedom if freedom else math.inf
    reach = student_quantile(1 - share / 2, degrees) * error
    low, mean, high = (math.expm1(difference + d) for d in (-reach, 0.0, reach))
    return Gain(mean, low, high, len(during))


def student_quantile(probability: float, degrees: float) -> float:
    """Of Student's t; within 1 % from 5 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _freedom(squared_error: float, num: int) -> float:
    return squared_error**2 / (num - 1)
