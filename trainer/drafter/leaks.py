"""Proof, before training, that no block sees what it will not have when it drafts.

Called by online/step.py before the first step, on the very function that trains, with the run's
shapes: a block's features at or behind its anchor, other documents of its row, other blocks and
other rows are replaced one by one, and its final states must keep every bit; the feature just
before the anchor must change them. A leak trains to a fine accuracy and drafts badly: of all that
goes wrong with DFlash it is the hardest to see later. Values are random, places are not: documents
meet in the middle of each row, and anchors are spread over both.

B batch, L context length, A anchors, K block size, D hidden, F features of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_workers.contract.errors import Permanent
from trainer.drafter.blocks import BlockBatch
from trainer.drafter.config import DrafterConfig

BlockStates = Callable[[Tensor, Tensor, BlockBatch], Tensor]  # Objective.block_states


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """Shapes of a run's batches, so that nothing is compiled for the probe alone."""

    num_rows: int
    row_len: int
    num_anchors: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Places that get other values, and whether the block in `slot` of row 0 may notice."""

    what: str
    slot: int
    features_BL: Tensor  # bool
    blocks_BA: Tensor  # bool
    is_seen: bool = False


def check_leaks(states_of: BlockStates, config: DrafterConfig, shape: ProbeShape) -> None:
    """Raises Permanent, naming what leaks into a block or never reaches it."""
    batch = _probe_batch(shape)
    values, others = (_random_inputs(config, shape, seed) for seed in (0, 1))
    before = _states(states_of, values, batch)
    for change in _changes(batch):
        changed = (
            torch.where(change.features_BL[..., None], others[0], values[0]),
            torch.where(change.blocks_BA[..., None, None], others[1], values[1]),
        )
        after = _states(states_of, changed, batch)
        is_kept = torch.equal(before[0, change.slot], after[0, change.slot])
        if is_kept == change.is_seen:
            verb = "never reaches" if change.is_seen else "leaks into"
            raise Permanent(
                f"this drafter must not be trained: {change.what} {verb} the block whose anchor is "
                f"{int(batch.anchors_BA[0, change.slot])} in a row of {shape.row_len}: its mask or "
                "its positions are wrong"
            )


def _probe_batch(shape: ProbeShape) -> BlockBatch:
    places_L = torch.arange(shape.row_len)
    positions_L = places_L % -(-shape.row_len // 2)  # two documents
    num_used = min(shape.num_anchors, shape.row_len - 1)
    anchors_A = torch.full((shape.num_anchors,), -1)
    # From the end: a single anchor has context, too.
    anchors_A[:num_used] = torch.linspace(shape.row_len - 1, 1, num_used).long().flip(0)
    rows = (torch.zeros_like(places_L), positions_L, anchors_A)
    return BlockBatch(*(r.expand(shape.num_rows, -1).clone().to(shape.device) for r in rows))


def _random_inputs(config: DrafterConfig, shape: ProbeShape, seed: int) -> tuple[Tensor, Tensor]:
    """Features, [B, L, F], and embedded blocks, [B, A, K, D]."""
    num_features = len(config.target_layer_ids) * config.hidden_size
    generator = torch.Generator(shape.device).manual_seed(seed)
    rows, size = shape.num_rows, (shape.num_anchors, config.block_size, config.hidden_size)
    return (
        torch.randn(rows, shape.row_len, num_features, generator=generator, device=shape.device),
        torch.randn(rows, *size, generator=generator, device=shape.device),
    )


def _states(states_of: BlockStates, values: tuple[Tensor, Tensor], batch: BlockBatch) -> Tensor:
    # With gradients, though none is taken: without, another graph would be compiled.
    return states_of(values[0], values[1].flatten(1, 2), batch).detach()


def _changes(batch: BlockBatch) -> Iterator[_Change]:
    num_used = int((batch.anchors_BA[0] >= 0).sum())
    row_len = batch.positions_BL.shape[1]
    place_BL = torch.arange(row_len, device=batch.ids_BL.device).expand_as(batch.ids_BL)
    slot_BA = torch.arange(batch.anchors_BA.shape[1], device=batch.ids_BL.device).expand_as(
        batch.anchors_BA
    )
    row_B1 = torch.arange(len(batch.ids_BL), device=batch.ids_BL.device)[:, None]
    document_BL = (batch.positions_BL == 0).cumsum(1)
    nowhere_BL, no_block_BA = place_BL < 0, slot_BA < 0
    for slot in sorted({0, num_used // 2, num_used - 1}):
        anchor = int(batch.anchors_BA[0, slot])
        own_BL = document_BL == document_BL[0, anchor]
        # First: what else leaks may come through another block.
        yield _Change("another block", slot, nowhere_BL, slot_BA != slot)
        yield _Change("the feature at the anchor", slot, place_BL == anchor, no_block_BA)
        yield _Change("a feature behind the anchor", slot, place_BL > anchor, no_block_BA)
        yield _Change("another document of the row", slot, ~own_BL, no_block_BA)
        yield _Change("another row", slot, (row_B1 > 0) & ~nowhere_BL, (row_B1 > 0) & ~no_block_BA)
        if int(batch.positions_BL[0, anchor]) > 0:
            just_before_BL = place_BL == anchor - 1
            yield _Change(
                "the feature before the anchor", slot, just_before_BL, no_block_BA, is_seen=True
            )
