"""What an evaluation counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_workers.contract.errors import NotEnough
from trainer.drafter.config import DrafterShape
from trainer.drafter.fitting import drafter_config
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import Limits, PlainReply
from trainer.drafter.start import Start, start_at_random
from trainer.evaluate import Question, Terms, evaluate, parting_gap
from trainer.online.target import target_config


@pytest.fixture
def untrained(qwen_dir: Path) -> Drafter:
    shape = DrafterShape(num_layers=1, block_size=4)
    drafter = Drafter(drafter_config(target_config(str(qwen_dir)), shape, str(qwen_dir)))
    start_at_random(drafter, seed=0)
    return drafter


QUESTIONS = [
    Question([11, 12, 13, 14], source="a.jsonl", turn=0),
    Question([200, 7, 31], source="b.jsonl", turn=1, thinks=True),
    Question([90, 91, 92], source="b.jsonl", turn=0),
]
LIMITS = Limits(16, frozenset())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_drafter_gains_nothing_and_breaks_nothing(
    qwen_dir: Path, untrained: Drafter, temperature: float
) -> None:
    terms = Terms(LIMITS, temperature=temperature, prompts_at_once=2)

    measured = evaluate(str(qwen_dir), untrained, QUESTIONS, terms, start=Start(seed=0))

    assert measured.accept_length == pytest.approx(measured.accept_length_untrained)
    assert (measured.gain, measured.gain_low, measured.gain_high) == (0.0, 0.0, 0.0)
    assert (measured.num_faults, measured.num_ties, measured.num_loops) == (0, 0, 0)
    assert measured.num_prompts == len(measured.by_prompt) == 3


def test_the_same_seed_measures_the_same_whatever_is_decoded_at_once(
    qwen_dir: Path, untrained: Drafter
) -> None:
    found = [
        evaluate(
            str(qwen_dir),
            untrained,
            QUESTIONS,
            Terms(LIMITS, temperature=1.0, seed=seed, prompts_at_once=at_once),
            start=Start(seed=1),
        )
        for seed, at_once in ((2, 1), (2, 3), (3, 3))
    ]

    assert found[0].acceptance == found[1].acceptance
    assert found[0].acceptance != found[2].acceptance


def test_a_drafter_may_be_compared_with_another_one(qwen_dir: Path, untrained: Drafter) -> None:
    measured = evaluate(str(qwen_dir), untrained, QUESTIONS, Terms(LIMITS), start=untrained)

    assert measured.accept_length == pytest.approx(measured.accept_length_untrained)


def test_what_is_known_of_a_prompt_groups_it(qwen_dir: Path, untrained: Drafter) -> None:
    measured = evaluate(str(qwen_dir), untrained, QUESTIONS, Terms(LIMITS), start=Start(seed=1))

    found = measured.acceptance
    assert {k: m.num_prompts for k, m in found.by_source.items()} == {"a.jsonl": 1, "b.jsonl": 2}
    assert {k: m.num_prompts for k, m in found.by_turn.items()} == {"0": 2, "1": 1}
    assert {k: m.num_prompts for k, m in found.by_part.items()} == {"thinking": 1, "answer": 2}
    assert found.overall.mean == measured.accept_length


def test_both_ways_are_timed_on_the_same_tokens(qwen_dir: Path, untrained: Drafter) -> None:
    terms = Terms(LIMITS, prompts_at_once=2)

    speed = evaluate(str(qwen_dir), untrained, QUESTIONS, terms, start=Start(seed=0)).speed

    assert speed is not None
    assert (speed.num_tokens, speed.prompts_at_once) == (48, 2)
    assert speed.speedup == pytest.approx(speed.tokens_per_s / speed.plain_tokens_per_s)


def test_without_a_prompt_there_is_nothing_to_measure(qwen_dir: Path, untrained: Drafter) -> None:
    with pytest.raises(NotEnough, match="no held-out prompt"):
        evaluate(str(qwen_dir), untrained, [], Terms(LIMITS), start=Start(seed=0))


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
    plain = PlainReply([1, 2, 3], [0.5, 0.25, 0.125])

    assert parting_gap(plain, ids) == gap
