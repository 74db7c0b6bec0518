"""What an evaluation counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_workers.contract.errors import NotEnough
from trainer.drafter.config import DrafterShape
from trainer.drafter.fitting import drafter_config
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import GreedyReply, Limits
from trainer.drafter.start import Start, start_at_random
from trainer.evaluate import bootstrap_interval, evaluate, parting_gap
from trainer.online.target import target_config


@pytest.fixture
def untrained(qwen_dir: Path) -> Drafter:
    shape = DrafterShape(num_layers=1, block_size=4)
    drafter = Drafter(drafter_config(target_config(str(qwen_dir)), shape, str(qwen_dir)))
    start_at_random(drafter, seed=0)
    return drafter


def test_an_untrained_drafter_gains_nothing_and_breaks_nothing(
    qwen_dir: Path, untrained: Drafter
) -> None:
    prompts = [[11, 12, 13, 14], [200, 7, 31]]

    measured = evaluate(
        str(qwen_dir), untrained, prompts, Limits(16, frozenset()), start=Start(seed=0)
    )

    assert measured.accept_length == measured.accept_length_untrained
    assert (measured.gain, measured.gain_low, measured.gain_high) == (0.0, 0.0, 0.0)
    assert (measured.num_faults, measured.num_loops, measured.num_prompts) == (0, 0, 2)


def test_at_a_temperature_replies_are_samples_and_no_fault(
    qwen_dir: Path, untrained: Drafter
) -> None:
    prompts = [[11, 12, 13, 14], [200, 7, 31]]
    limits = Limits(16, frozenset())

    first, second = (
        evaluate(str(qwen_dir), untrained, prompts, limits, start=Start(seed=1), temperature=1.0)
        for _ in range(2)
    )

    assert first.by_prompt == second.by_prompt
    assert (first.num_faults, first.num_ties, first.num_prompts) == (0, 0, 2)
    assert first.accept_length >= 1.0


def test_without_a_prompt_there_is_nothing_to_measure(qwen_dir: Path, untrained: Drafter) -> None:
    with pytest.raises(NotEnough):
        evaluate(str(qwen_dir), untrained, [], Limits(16, frozenset()), start=Start(seed=0))


def test_the_interval_holds_the_mean_and_narrows_with_more_prompts() -> None:
    random = np.random.default_rng(1)
    few, many = random.normal(0.5, 0.2, 12), random.normal(0.5, 0.2, 400)

    low, high = bootstrap_interval(few)
    low_many, high_many = bootstrap_interval(many)

    assert low < few.mean() < high
    assert high_many - low_many < high - low
    assert (low, high) == bootstrap_interval(few)


@pytest.mark.parametrize(
    ("ids", "gap"),
    [
        ([1, 2, 3], None),
        ([1, 9, 3], 0.25),
        ([1, 2], float("inf")),  # it ended too soon
        ([1, 2, 3, 4], float("inf")),
    ],
)
def test_a_reply_that_parts_from_the_targets_own_is_judged_by_the_gap_there(
    ids: list[int], gap: float | None
) -> None:
    plain = GreedyReply([1, 2, 3], [0.5, 0.25, 0.125])

    assert parting_gap(plain, ids) == gap
