"""Estimates against figures that people worked out or that a real run had."""

from __future__ import annotations

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.estimate import (
    Features,
    Price,
    Work,
    break_even_accept_length,
    costs,
    durations,
    gpu_hours,
    prompts_per_s,
    read_prices,
    with_drafter,
)

# A run of 913,786 prompts on seven GPUs; 902,087 answers of 1.64 billion tokens, 7.25 GB.
PROMPTS = 913_786
DONE = 902_087


def work(output_tokens: float = 1.64e9 / DONE, num_prompts: int = PROMPTS) -> Work:
    return Work(num_prompts, 255.0, output_tokens, 7.25e9 / DONE)


def test_913_786_prompts_at_5_6_a_second_take_45_hours() -> None:
    total = gpu_hours(work(), 5.6 / 7)

    (seven,) = durations(total, 1, 7)

    assert seven.hours == pytest.approx(45.3, abs=0.05)
    assert total == pytest.approx(7 * 45.3, abs=0.4)


def test_four_gpus_at_400_tokens_a_second_take_sixteen_days_for_answers_of_2_500_tokens() -> None:
    expected = work(output_tokens=2500.0)

    (four,) = durations(gpu_hours(expected, prompts_per_s(400.0, expected)), 1, 4)

    assert four.hours / 24 == pytest.approx(16.5, rel=0.1)


def test_training_from_stored_hidden_states_would_need_90_terabytes() -> None:
    tokens_of_2000 = Work(DONE, 500.0, 1500.0, None)

    stored = Features(num_layers=5, hidden_size=5120).stored_bytes(tokens_of_2000)

    assert stored == pytest.approx(90e12, rel=0.05)


def test_bytes_in_s3_are_those_of_the_rows_so_far_or_unknown() -> None:
    assert work().s3_bytes == pytest.approx(7.344e9, rel=0.001)
    assert Work(10, 1.0, 1.0, None).s3_bytes is None


def test_money_does_not_depend_on_the_number_of_gpus_and_time_does() -> None:
    three = durations(60.0, 3, 2)

    assert [(d.num_nodes, d.num_gpus, d.hours) for d in three] == [
        (1, 2, 30.0),
        (2, 4, 15.0),
        (3, 6, 10.0),
    ]
    h200, b200 = costs(60.0, [Price("h200", 3.2), Price("b200", 6.0)], 0.35)
    assert (h200.usd, h200.spot_usd) == pytest.approx((192.0, 67.2))
    assert (b200.usd, b200.spot_usd) == pytest.approx((360.0, 126.0))
    assert costs(60.0, [Price("h200", 3.2)], None)[0].spot_usd is None


@pytest.mark.parametrize(
    ("plain", "drafted", "break_even"), [(447.0, 208.0, 2.15), (17_720.0, 7_844.0, 2.26)]
)
def test_a_drafter_pays_from_the_accept_length_that_makes_up_for_its_steps(
    plain: float, drafted: float, break_even: float
) -> None:
    found = break_even_accept_length(plain, drafted, 1.0)

    assert found == pytest.approx(break_even, abs=0.005)
    assert with_drafter(drafted, 1.0, found) == pytest.approx(plain)
    assert break_even_accept_length(plain, drafted * 2.5, 2.5) == pytest.approx(found)


def test_prices_are_read_or_refused_by_name() -> None:
    assert read_prices("h200=3.2, b200=6") == [Price("h200", 3.2), Price("b200", 6.0)]
    assert read_prices("") == []
    for wrong in ("h200", "h200=cheap", "=3", "h200=-1", "h200=nan"):
        with pytest.raises(BadInput, match="NAME=DOLLARS"):
            read_prices(wrong)


def test_where_nothing_moves_nothing_is_foretold() -> None:
    with pytest.raises(BadInput, match="rate is 0"):
        gpu_hours(work(), 0.0)
    with pytest.raises(BadInput, match="--output-tokens"):
        prompts_per_s(400.0, Work(1, 1.0, 0.0, None))
