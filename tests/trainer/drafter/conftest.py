"""A small drafter: with full attention, with a sliding layer, with a DSpark head."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.heads import MarkovHead
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_at_random


@pytest.fixture(params=["full", "sliding", "dspark"])
def drafter(request: pytest.FixtureRequest, small_config: DrafterConfig) -> Drafter:
    config = small_config
    if request.param == "sliding":
        config = dataclasses.replace(config, layer_types=[SLIDING, FULL], sliding_window=5)
    if request.param == "dspark":
        config = dataclasses.replace(config, markov_rank=6)
    drafter = Drafter(config)
    start_at_random(drafter, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # far from linear, so that differences show
        if isinstance(drafter.markov_head, MarkovHead):
            drafter.markov_head.markov_w2.weight.normal_()
    return drafter
