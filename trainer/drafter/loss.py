"""The drafter's loss: weighted cross-entropy at the masked places of each block.

Offset k of a block predicts the token at anchor + k, for k = 1 .. K-1; offset 0 is the anchor and
is not scored. Earlier places weigh more, w_k = exp(-(k-1)/gamma), because one wrong token ends the
acceptance of all that follow; labels beyond the end weigh nothing. The full logits never exist:
rows go through the frozen head in chunks, forward and backward at once. step.py divides by the
weight once, over all microbatches. Source: arXiv 2602.06036, section 4.2.

B batch, L context length, A anchors, K block size, D hidden, V vocab, N rows = B*A*(K-1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput


@dataclass(frozen=True, slots=True)
class LossRecipe:
    """How the places of a block are weighed."""

    gamma: float  # places; paper: 7 for blocks of 16, 5 for 10, 4 for 8
    chunk_rows: int = 2048  # rows of logits in memory at once: 1.2 GB at 152k ids in fp32

    def __post_init__(self) -> None:
        if self.gamma <= 0 or self.chunk_rows < 1:
            raise BadInput(f"{self}: gamma and chunk_rows must be positive")


@dataclass(frozen=True, slots=True, eq=False)
class BlockLabels:
    """What the scored places should say, and how much each counts."""

    ids_BAK: Tensor  # K-1 places: offset 0 is left out
    weights_BAK: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over one microbatch; only the numerator carries a gradient."""

    numerator: Tensor
    weight: Tensor
    correct_K: Tensor  # drafts that hit, by place
    scored_K: Tensor  # drafts that had a label, by place


def block_labels(
    ids_BL: Tensor, lengths_B: Tensor, anchors_BA: Tensor, *, weights_K: Tensor
) -> BlockLabels:
    """The labels of all blocks; `weights_K` from `place_weights`."""
    offsets_K = torch.arange(1, len(weights_K) + 1, device=ids_BL.device)
    places_BAK = anchors_BA[:, :, None] + offsets_K
    exists_BAK = (anchors_BA >= 0)[:, :, None] & (places_BAK < lengths_B[:, None, None])
    places_BAK = torch.where(exists_BAK, places_BAK, 0)
    labels_BAK = ids_BL.gather(1, places_BAK.flatten(1)).view_as(places_BAK)
    return BlockLabels(labels_BAK, weights_K * exists_BAK)


def place_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """w_k for k = 1 .. K-1."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def block_loss(
    hidden_BAKD: Tensor, labels: BlockLabels, head_VD: Tensor, *, chunk_rows: int
) -> LossSums:
    """Loss sums of the K places of each block, the first of which is not scored."""
    scored_ND = hidden_BAKD[:, :, 1:].flatten(0, 2)
    labels_N, weights_N = labels.ids_BAK.flatten(), labels.weights_BAK.flatten()
    numerator, hits_N = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        scored_ND, labels_N, weights_N, head_VD, chunk_rows
    )
    counted_BAK = labels.weights_BAK > 0
    hits_BAK = hits_N.view_as(counted_BAK) & counted_BAK
    return LossSums(
        numerator,
        labels.weights_BAK.sum(),
        correct_K=hits_BAK.sum((0, 1)),
        scored_K=counted_BAK.sum((0, 1)),
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of weight * cross-entropy over rows, with the gradient taken on the way.

    The head is frozen, so the rows' gradient is all that backward needs: it is made while a
    chunk's logits are at hand, which saves computing them a second time.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, labels_N: Tensor, weights_N: Tensor, head_VD: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        numerator = rows_ND.new_zeros((), dtype=torch.float32)
        hits_N = torch.empty_like(labels_N, dtype=torch.bool)
        gradient_ND = torch.empty_like(rows_ND)
        for start in range(0, len(rows_ND), chunk):
            part = slice(start, start + chunk)
            labels, weights = labels_N[part, None], weights_N[part, None]
            logits = rows_ND[part].to(head_VD.dtype).matmul(head_VD.T).float()
            hits_N[part] = logits.argmax(-1) == labels_N[part]
            log_probs = logits.log_softmax(-1)
            numerator -= (weights * log_probs.gather(1, labels)).sum()
            slope = log_probs.exp_().mul_(weights).scatter_add_(1, labels, -weights)
            gradient_ND[part] = slope.to(head_VD.dtype).matmul(head_VD)
        ctx.save_for_backward(gradient_ND)
        ctx.mark_non_differentiable(hits_N)
        return numerator, hits_N

    @staticmethod
    def backward(ctx: Any, numerator: Tensor, _hits_N: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_ND,) = ctx.saved_tensors
        return gradient_ND * numerator, None, None, None, None
