"""Choices against the distribution that they are drawn from."""

from __future__ import annotations

import pytest
import torch

from dflash_workers.contract.errors import BadInput
from trainer.drafter.choices import Chooser, Sampling

CPU = torch.device("cpu")
LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 0.0, -30.0])


def test_samples_come_as_often_as_their_probability_says() -> None:
    num = 4000
    chooser = Chooser(Sampling(temperature=0.8, seed=1), num, 1, CPU)

    ids_BL = chooser.choose(LOGITS_V.expand(num, 1, -1), torch.arange(num), torch.zeros(num).long())

    probs = (LOGITS_V.double() / 0.8).softmax(-1)
    shares = ids_BL.flatten().bincount(minlength=5) / num
    assert (shares - probs).abs().max() < 4 * (0.25 / num) ** 0.5


def test_a_place_has_its_draw_however_it_is_reached() -> None:
    logits_BLV = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(2)
    whole = Chooser(Sampling(1.0, seed=3), 2, 6, CPU).choose(
        logits_BLV, numbers, torch.tensor([0, 0])
    )

    chooser = Chooser(Sampling(1.0, seed=3, first_number=1), 1, 6, CPU)
    second = chooser.choose(logits_BLV[1:, 4:], torch.tensor([0]), torch.tensor([4]))

    assert second.tolist() == whole[1:, 4:].tolist()


def test_a_gap_says_how_far_the_next_choice_was() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.75]]])
    ids, gaps = Chooser(Sampling(), 1, 1, CPU).choose_with_gaps(
        logits, torch.tensor([0]), torch.tensor([0])
    )

    assert ids.item() == 1
    assert gaps.item() == pytest.approx(0.25)


def test_a_temperature_below_zero_is_refused() -> None:
    with pytest.raises(BadInput):
        Sampling(temperature=-0.1)
