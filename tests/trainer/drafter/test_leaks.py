"""The proof passes what is right and names what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_workers.contract.errors import Permanent
from trainer.drafter import mask
from trainer.drafter.blocks import BlockBatch
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.leaks import ProbeShape, check_leaks
from trainer.drafter.loss import LossRecipe
from trainer.drafter.mask import BlockLayout, KeyRanges
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.start import start_at_random

CPU = torch.device("cpu")
SHAPE = ProbeShape(num_rows=2, row_len=24, num_anchors=6, device=CPU)
RULE = mask.key_ranges


def objective_of(config: DrafterConfig) -> Objective:
    drafter = Drafter(config)
    start_at_random(drafter, seed=0)
    head = torch.randn(config.vocab_size, config.hidden_size)
    return Objective(drafter, TargetEnds(lambda ids: head[ids], head), LossRecipe(2.0))


def sliding(config: DrafterConfig) -> DrafterConfig:
    return dataclasses.replace(config, layer_types=[SLIDING, FULL], sliding_window=5)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        ProbeShape(1, 24, 1, CPU),  # a single block
        ProbeShape(1, 5, 40, CPU),  # more slots than places
        ProbeShape(1, 33, 12, CPU),
    ],
)
def test_a_sound_drafter_passes_in_any_shape(
    small_config: DrafterConfig, shape: ProbeShape
) -> None:
    for config in (small_config, sliding(small_config)):
        check_leaks(objective_of(config).block_states, config, shape)


def sees_the_anchor(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    return dataclasses.replace(ranges, context_to=ranges.context_to + 1)


def sees_what_comes_later(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    past = ranges.context_to + 1
    return dataclasses.replace(
        ranges,
        context_from=torch.where(past < layout.context_len, past, ranges.context_from),
        context_to=torch.where(past < layout.context_len, past + 1, ranges.context_to),
    )


def sees_the_document_before(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    return dataclasses.replace(ranges, context_from=torch.zeros_like(ranges.context_from))


def sees_the_next_block(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    further = (ranges.block_to + layout.block_size).clamp_max(layout.num_keys)
    return dataclasses.replace(ranges, block_to=further)


def sees_the_block_before(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    back = (ranges.block_from - layout.block_size).clamp_min(layout.context_len)
    return dataclasses.replace(ranges, block_from=back)


def sees_no_context(layout: BlockLayout) -> KeyRanges:
    ranges = RULE(layout)
    return dataclasses.replace(ranges, context_to=ranges.context_from)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (sees_the_anchor, "the feature at the anchor leaks"),
        (sees_what_comes_later, "a feature behind the anchor leaks"),
        (sees_the_document_before, "another document of the row leaks"),
        (sees_the_next_block, "another block leaks"),
        (sees_the_block_before, "another block leaks"),
        (sees_no_context, "the feature before the anchor never reaches"),
    ],
)
def test_a_wrong_mask_is_refused_and_named(
    small_config: DrafterConfig,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[BlockLayout], KeyRanges],
    name: str,
) -> None:
    monkeypatch.setattr(mask, "key_ranges", mutant)

    for config in (small_config, sliding(small_config)):
        with pytest.raises(Permanent, match=name):
            check_leaks(objective_of(config).block_states, config, SHAPE)


def test_rows_that_mix_are_refused(small_config: DrafterConfig) -> None:
    objective = objective_of(small_config)

    def mixing(features: Tensor, embedded: Tensor, batch: BlockBatch) -> Tensor:
        return objective.block_states(features + features.mean(0), embedded, batch)

    with pytest.raises(Permanent, match="leaks"):
        check_leaks(mixing, small_config, ProbeShape(2, 24, 6, CPU))
