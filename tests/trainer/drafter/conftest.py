"""A small drafter, with full attention and with a sliding layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_at_random


@pytest.fixture(params=["full", "sliding"])
def drafter(request: pytest.FixtureRequest, small_config: DrafterConfig) -> Drafter:
    config = small_config
    if request.param == "sliding":
        config = dataclasses.replace(config, layer_types=[SLIDING, FULL], sliding_window=5)
    drafter = Drafter(config)
    start_at_random(drafter, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # far from linear, so that differences show
    return drafter
