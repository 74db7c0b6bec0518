"""Figures of counts that are written down."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trainer.acceptance import Counted, acceptance, bootstrap_interval, mean_over

COUNTED = [
    Counted("a", 0, tokens_by_step=[3, 1, 2], hits_by_step=[2, 0, 3], num_thinking=4),
    Counted("a", 1, tokens_by_step=[1, 1], hits_by_step=[0, 0], num_thinking=0),
    Counted("b", 0, tokens_by_step=[4], hits_by_step=[3], num_thinking=0),
]


def test_each_prompt_counts_once_and_each_source_once() -> None:
    found = acceptance(COUNTED)

    assert found.overall.mean == pytest.approx((2 + 1 + 4) / 3)
    assert found.by_source["a"].mean == pytest.approx(1.5)
    assert found.over_sources == pytest.approx((1.5 + 4) / 2)
    assert {turn: m.mean for turn, m in found.by_turn.items()} == {"0": 3.0, "1": 1.0}


def test_a_step_belongs_to_the_part_in_which_it_begins() -> None:
    # Tokens of the first reply: 0 with the prompt, 1-3, 4, 5-6; the thinking is 0 to 3.
    found = acceptance(COUNTED[:1]).by_part

    assert found["thinking"].mean == 3.0
    assert found["answer"].mean == pytest.approx((1 + 2) / 2)


def test_a_place_is_reached_where_all_drafts_up_to_it_hit() -> None:
    found = acceptance(COUNTED).by_place

    assert list(found) == ["1", "2", "3"]
    assert found["1"].mean == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["3"].mean == pytest.approx((1 / 3 + 0 + 1) / 3)


def test_drafts_that_never_hit_have_no_places() -> None:
    missed = dataclasses.replace(COUNTED[1], tokens_by_step=[1], hits_by_step=[0])

    assert acceptance([missed]).by_place == {}


def test_the_interval_holds_the_mean_and_narrows_with_more_prompts() -> None:
    random = np.random.default_rng(1)
    few, many = random.normal(0.5, 0.2, 12), random.normal(0.5, 0.2, 400)

    low, high = bootstrap_interval(few)
    low_many, high_many = bootstrap_interval(many)

    assert low < few.mean() < high
    assert high_many - low_many < high - low
    assert (low, high) == bootstrap_interval(few)


def test_the_interval_is_the_one_that_theory_gives() -> None:
    values = np.random.default_rng(2).normal(2.0, 0.5, 400)

    found = mean_over(values)

    half = 1.96 * values.std() / 400**0.5
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert found.num_prompts == 400
