"""The rule against simulated trials whose true gain is known."""

from __future__ import annotations

import math
import random

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.promotion.verdict import Outcome, Rule, estimate_gain, judge, student_quantile

RULE = Rule(max_requests=500, min_windows=12)
NOISE = 0.08  # of a window's log ratio


def outcome_of(true_gain: float, dice: random.Random) -> Outcome:
    """A whole trial: looks at growing shares of 60 windows."""
    before = [dice.gauss(0.2, NOISE) for _ in range(24)]  # the other GPU is slower
    during = [dice.gauss(0.2 + math.log1p(true_gain), NOISE) for _ in range(60)]
    for look in range(1, RULE.num_looks + 1):
        seen = during[: 12 * look]
        gain = estimate_gain(before, seen, RULE)
        outcome = judge(gain, RULE, is_last=look == RULE.num_looks)
        if outcome is not Outcome.OPEN:
            return outcome
    raise AssertionError("the last look left it open")


def share_promoted(true_gain: float, num_trials: int = 400) -> float:
    dice = random.Random(5)
    outcomes = [outcome_of(true_gain, dice) for _ in range(num_trials)]
    return outcomes.count(Outcome.FASTER) / num_trials


def test_a_drafter_that_only_just_meets_the_bound_is_seldom_promoted() -> None:
    assert share_promoted(RULE.gain) < 0.04  # half of the 5 % lie on each side


def test_a_drafter_that_changes_nothing_or_slows_is_not_promoted() -> None:
    assert share_promoted(0.0) == share_promoted(-0.1) == 0


def test_a_drafter_that_is_a_fifth_faster_is_promoted() -> None:
    assert share_promoted(0.2) > 0.98


def test_a_faster_gpu_is_not_taken_for_a_faster_drafter() -> None:
    gain = estimate_gain([0.5, 0.51, 0.49, 0.5], [0.5, 0.49, 0.51, 0.5], RULE)

    assert abs(gain.mean) < 1e-9
    assert gain.high < 0.05


# Student's t, from a printed table.
@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [(0.975, 5, 2.571), (0.975, 20, 2.086), (0.995, 10, 3.169), (0.995, 30, 2.750)],
)
def test_quantiles_are_those_of_the_tables(
    probability: float, degrees: float, value: float
) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(value, rel=0.01)


def test_looks_come_at_equal_shares_of_the_requests() -> None:
    due = [RULE.is_look_due(1, num_requests) for num_requests in (199, 200)]

    assert due == [False, True]


@pytest.mark.parametrize("bad", [{"confidence": 1.0}, {"num_looks": 0}, {"min_windows": 2}])
def test_a_rule_that_can_decide_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Rule(**bad)  # type: ignore[arg-type]
