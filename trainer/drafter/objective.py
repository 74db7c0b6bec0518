"""The drafter on one batch of blocks: features and tokens in, sums of the loss out.

Called by online/step.py, which owns target, optimizer and microbatches, and measured by
benchmarks/drafter_step.py. On a GPU the blocks' way through the drafter is one compiled graph over
flex attention, and no shape depends on the number of documents or anchors, so that rows of one
length are compiled once; on a CPU the same modules run as they stand under a dense mask. Invariant:
both are the same function of the same weights, to rounding.

B batch, L context length, A anchors, K block size, Q = A*K queries, D hidden, F features of the
target (layers * D), V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.drafter.blocks import BlockBatch, block_labels
from trainer.drafter.loss import LossRecipe, LossSums, block_loss
from trainer.drafter.mask import Mask, dense_mask, sparse_mask
from trainer.drafter.model import Drafter
from trainer.drafter.rotary import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class TargetEnds:
    """The frozen target's embedding and head."""

    embed: Callable[[Tensor], Tensor]
    head_VD: Tensor


class Objective:
    """A drafter and what it is trained for. The drafter's type is the type it computes in."""

    def __init__(self, drafter: Drafter, ends: TargetEnds, recipe: LossRecipe) -> None:
        self.drafter = drafter
        self._ends = ends
        self._recipe = recipe
        is_cuda = drafter.fc.weight.is_cuda
        self._make_mask = sparse_mask if is_cuda else dense_mask
        self._through = torch.compile(_through, fullgraph=True) if is_cuda else _through

    def loss_sums(
        self, features_BLF: Tensor, batch: BlockBatch, *, teacher_BLD: Tensor | None = None
    ) -> LossSums:
        """The loss, not yet divided by its weight. `teacher_BLD`: the target's final states, for
        recipes with a term that needs them.
        """
        embedded_BQD = self._ends.embed(self.drafter.block_ids(batch.ids_BL, batch.anchors_BA))
        hidden_BAKD = self.block_states(features_BLF, embedded_BQD, batch)
        head = self.drafter.markov_head
        labels = block_labels(batch, self.drafter.config.num_drafts)
        return block_loss(
            hidden_BAKD[:, :, head.first_offset :],
            labels,
            self._ends.head_VD,
            self._recipe,
            correction=head.correction(labels.before_BAK.flatten()),
            teacher_BAKD=None if teacher_BLD is None else self._teacher(teacher_BLD, batch),
        )

    def block_states(self, features_BLF: Tensor, embedded_BQD: Tensor, batch: BlockBatch) -> Tensor:
        """Final states of the blocks' tokens, [B, A, K, D]."""
        drafter, starts_BA = self.drafter, batch.starts_BA
        masks = drafter.block_masks(
            batch.anchors_BA, starts_BA, context_len=batch.ids_BL.shape[1], make=self._make_mask
        )
        dtype = drafter.fc.weight.dtype
        hidden_BQD = self._through(
            drafter,
            (features_BLF.to(dtype), drafter.rotary(batch.positions_BL)),
            (embedded_BQD.to(dtype), drafter.block_rotation(batch.anchors_BA, starts_BA)),
            masks,
        )
        num_batch, num_anchors = batch.anchors_BA.shape
        return hidden_BQD.view(num_batch, num_anchors, drafter.config.block_size, -1)

    def _teacher(self, teacher_BLD: Tensor, batch: BlockBatch) -> Tensor:
        """The states whose logits judge the scored tokens: each one place before its token."""
        offsets_K = torch.arange(self.drafter.config.num_drafts, device=teacher_BLD.device)
        places_BAK = (batch.anchors_BA.clamp_min(0)[:, :, None] + offsets_K).clamp_max(
            teacher_BLD.shape[1] - 1
        )
        rows_B = torch.arange(len(teacher_BLD), device=teacher_BLD.device)[:, None, None]
        return teacher_BLD[rows_B, places_BAK]


def _through(
    drafter: Drafter,
    context: tuple[Tensor, Rotation],
    block: tuple[Tensor, Rotation],
    masks: dict[str, Mask],
) -> Tensor:
    features_BLF, context_rotation = context
    embedded_BQD, block_rotation = block
    injected = drafter.inject(features_BLF, context_rotation)
    return drafter.fill(embedded_BQD, injected, block_rotation, masks)
