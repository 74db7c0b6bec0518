"""Counted operations against those that torch counts while a step runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.drafter.blocks import BlockBatch
from trainer.drafter.config import FULL, DrafterConfig
from trainer.drafter.flops import StepFlops, StepSize, step_flops, utilisation
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.start import start_at_random

ROW_LEN, NUM_ANCHORS = 40, 6


def test_a_step_counts_what_torch_counts(small_config: DrafterConfig) -> None:
    drafter = Drafter(small_config)
    start_at_random(drafter, 0)
    head = torch.randn(512, 32)
    # Inputs with gradients: the convention counts them.
    ends = TargetEnds(lambda ids: head[ids].requires_grad_(), head)
    features = torch.randn(1, ROW_LEN, 64, requires_grad=True)
    batch = BlockBatch(
        torch.zeros(1, ROW_LEN, dtype=torch.long),
        torch.arange(ROW_LEN)[None],
        torch.arange(1, 1 + NUM_ANCHORS)[None],
    )
    num_queries = NUM_ANCHORS * small_config.block_size
    # The dense mask computes every pair; what it hides is counted by nobody but torch.
    pairs = {FULL: num_queries * (ROW_LEN + num_queries)}

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective = Objective(drafter, ends, LossRecipe(2.0))
        objective.loss_sums(features, batch).numerator.backward()  # type: ignore[no-untyped-call]

    size = StepSize(ROW_LEN, num_queries, NUM_ANCHORS * (small_config.block_size - 1), pairs)
    assert step_flops(small_config, size).total == counter.get_total_flops()


def test_utilisation_is_the_share_of_the_peak() -> None:
    flops = StepFlops(layers=40, context=30, head=20, attention=10)

    assert utilisation(flops, seconds=2.0, peak=200.0) == pytest.approx(0.25)
