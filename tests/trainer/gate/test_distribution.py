"""Distributions: facts as sorting all values would give them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.gate.distribution import LONGEST, Distribution


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_the_facts_are_those_of_the_sorted_values(values: list[int]) -> None:
    distribution = Distribution()

    for value in values:
        distribution.add(value)

    facts = distribution.facts()
    ordered = sorted(values)
    for name, share in (("p1", 0.01), ("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert sum(v <= facts[name] for v in ordered) >= share * len(values)
        assert sum(v < facts[name] for v in ordered) < share * len(values)
    assert facts["max"] == ordered[-1]
    assert abs(facts["mean"] - sum(values) / len(values)) < 0.05 + 1e-6  # of one decimal place
    for name, count in facts["bins"].items():
        low, _, high = name.partition("-")
        assert count == sum(int(low) <= v <= int(high or low) for v in values)
    assert sum(facts["bins"].values()) == len(values)


def test_nothing_counted_has_no_quantiles() -> None:
    assert Distribution().facts() == {"num": 0, "bins": {}}


def test_what_is_longer_than_the_longest_counts_as_that() -> None:
    distribution = Distribution()

    distribution.add(10 * LONGEST)

    assert distribution.facts()["max"] == LONGEST
