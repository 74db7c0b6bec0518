"""How long a simulated engine's answers are."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.simulated.lengths import Lengths


def drawn(lengths: Lengths, count: int = 20_000) -> list[int]:
    dice = random.Random(1)
    return [lengths.at(dice.random(), dice.random()) for _ in range(count)]


def test_lengths_have_the_mean_and_the_deviation_that_were_asked_for() -> None:
    found = drawn(Lengths(mean=1600.0, variation=1.0))

    assert statistics.fmean(found) == pytest.approx(1600, rel=0.03)
    assert statistics.stdev(found) == pytest.approx(1600, rel=0.10)


def test_without_variation_all_are_alike() -> None:
    assert set(drawn(Lengths(256.0, 0.0), 50)) == {256}


def test_a_tail_makes_some_very_long_and_leaves_the_mean_as_it_is() -> None:
    lengths = Lengths(mean=200.0, variation=0.5, tail_share=0.02, longest=20_000)

    found = drawn(lengths, 50_000)

    assert statistics.fmean(found) == pytest.approx(200, rel=0.05)
    assert sum(length >= 800 for length in found) / len(found) == pytest.approx(0.02, rel=0.2)
    assert max(found) > 8000
    assert max(drawn(Lengths(200.0, 0.5), 50_000)) < 3000


def test_no_answer_is_longer_than_the_longest_or_empty() -> None:
    found = drawn(Lengths(mean=20.0, variation=3.0, tail_share=0.05, longest=300))

    assert max(found) == 300
    assert min(found) >= 2


@pytest.mark.parametrize("wrong", [{"mean": 1.0}, {"tail_share": 0.2}, {"longest": 50}])
def test_lengths_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    facts = {"mean": 100.0, "variation": 1.0} | wrong

    with pytest.raises(ValueError):
        Lengths(**facts)  # type: ignore[arg-type]
