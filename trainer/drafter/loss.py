"""The drafter's loss: weighted cross-entropy at the masked places of each block.

Offset k of a block predicts the token at anchor + k, for k = 1 .. K. Earlier places weigh more,
because one wrong token ends the acceptance of all that follow: w_k = exp(-(k-1)/gamma), or D-PACE's
weights, made of the drafter's own confidence. Terms that pull towards the target's distribution may
be added. The full logits never exist: blocks go through the frozen head in chunks, forward and
backward at once. step.py divides by the weight once, over all microbatches.
Source: arXiv 2602.06036, section 4.2; D-PACE: arXiv 2605.18810.

B batch, A anchors, K scored places of a block, D hidden, V vocab, N rows = B*A*K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.blocks import BlockLabels
from trainer.drafter.heads import Correction

DECAY, DPACE = "decay", "dpace"


@dataclass(frozen=True, slots=True)
class LossRecipe:
    """What is minimised, and how the places of a block are weighed."""

    gamma: float  # places; paper: 7 for blocks of 16, 5 for 10, 4 for 8
    weights: str = DECAY  # or DPACE, which knows no gamma
    dpace_alpha: float = 0.5  # of D-PACE: confidence that each place has at least
    cross_entropy: float = 1.0  # factor of the term with the token that the target sampled
    distillation: float = 0.0  # factor of KL(target's distribution || drafter's)
    total_variation: float = 0.0  # factor of the distance that rejection sampling pays for
    chunk_rows: int = 2048  # rows of logits in memory at once: 0.6 GB at 152k ids in bf16

    def __post_init__(self) -> None:
        if self.gamma <= 0 or self.chunk_rows < 1:
            raise BadInput(f"{self}: gamma and chunk_rows must be positive")
        if self.weights not in (DECAY, DPACE):
            raise BadInput(f"weights {self.weights!r}: one of {DECAY}, {DPACE}")
        if not 0 <= self.dpace_alpha <= 1:
            raise BadInput(f"dpace_alpha {self.dpace_alpha}: between 0 and 1")
        factors = (self.cross_entropy, self.distillation, self.total_variation)
        if min(factors) < 0 or max(factors) == 0:
            raise BadInput(f"{self}: factors can't be negative, nor all zero")

    @property
    def needs_teacher(self) -> bool:
        """Whether a term asks for the target's own distribution."""
        return self.distillation > 0 or self.total_variation > 0


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over one microbatch; only the numerator carries a gradient."""

    numerator: Tensor
    weight: Tensor
    correct_K: Tensor  # drafts that hit, by place
    scored_K: Tensor  # drafts that had a label, by place
    num_accepted: Tensor  # drafts that hit with all before them in their block
    num_blocks: Tensor  # that had a label
    entropy: Tensor  # of the drafter's distributions, nats


def block_loss(
    hidden_BAKD: Tensor,
    labels: BlockLabels,
    head_VD: Tensor,
    recipe: LossRecipe,
    *,
    correction: Correction | None = None,
    teacher_BAKD: Tensor | None = None,
) -> LossSums:
    """Loss sums of the scored places of each block; `correction`, of their rows, is the head's.

    `teacher_BAKD` are the target's final states at the places before, whose own logits judge the
    same tokens; only recipes that need a teacher take them.
    """
    if recipe.needs_teacher != (teacher_BAKD is not None):
        raise BadInput(f"{recipe}: the target's final states are needed if and only if a term is")
    teacher_ND = None if teacher_BAKD is None else teacher_BAKD.flatten(0, 2)
    more = (None, None) if correction is None else (correction.rows_NR, correction.table_VR)
    numerator, weight, hits_N, entropy_N = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BAKD.flatten(0, 2), *more, labels, head_VD, recipe, teacher_ND
    )
    hits_BAK = hits_N.view_as(labels.exist_BAK)
    return LossSums(
        numerator,
        weight,
        correct_K=hits_BAK.sum((0, 1)),
        scored_K=labels.exist_BAK.sum((0, 1)),
        num_accepted=hits_BAK.cumprod(-1).sum(),
        num_blocks=labels.exist_BAK[:, :, 0].sum(),
        entropy=entropy_N.sum(),
    )


class _ChunkedLoss(torch.autograd.Function):
    """Sum of weighted losses over rows, with the gradient taken on the way.

    The head is frozen, so the gradients of the rows (and of a correction's rows and table) are all
    that backward needs: they are made while a chunk's logits are at hand, which saves computing
    them a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        more_NR: Tensor | None,
        table_VR: Tensor | None,
        labels: BlockLabels,
        head_VD: Tensor,
        recipe: LossRecipe,
        teacher_ND: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        products = [(rows_ND, head_VD)]
        if more_NR is not None and table_VR is not None:
            products.append((more_NR, table_VR))
        num_places = labels.ids_BAK.shape[-1]
        score = _scorer(recipe, num_places, compiled=rows_ND.is_cuda)
        labels_N, exist_N = labels.ids_BAK.flatten(), labels.exist_BAK.flatten()
        slopes, table_slopes = _zeros(r for r, _ in products), _zeros(t for _, t in products[1:])
        parts = []
        for part in _chunks(len(rows_ND), num_places, recipe.chunk_rows):
            logits_NV = _logits(rows_ND[part], head_VD)
            for rows, table in products[1:]:
                logits_NV += _logits(rows[part], table)
            teacher_NV = None if teacher_ND is None else _logits(teacher_ND[part], head_VD)
            slope_NV, *sums = score(logits_NV, labels_N[part], exist_N[part], teacher_NV)
            for slope, (_, table) in zip(slopes, products, strict=True):
                slope[part] = slope_NV @ table
            for slope, (rows, _) in zip(table_slopes, products[1:], strict=True):
                slope += slope_NV.T @ rows[part]
            del logits_NV, slope_NV, teacher_NV  # before the next chunk's are made
            parts.append(sums)
        loss_N, weight_N, hits_N, entropy_N = (torch.cat(p) for p in zip(*parts, strict=True))
        weight = weight_N.sum()
        ctx.save_for_backward(*slopes, *table_slopes)
        ctx.mark_non_differentiable(weight, hits_N, entropy_N)
        return loss_N.sum(), weight, hits_N, entropy_N

    @staticmethod
    def backward(ctx: Any, numerator: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [slope * numerator for slope in ctx.saved_tensors]  # of the first 1 or 3 inputs
        return *slopes, *[None] * (7 - len(slopes))


def _zeros(like: Iterable[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in like]


def _chunks(num_rows: int, num_places: int, chunk_rows: int) -> list[slice]:
    """Whole blocks, as even as they can be: chunks of one size are compiled once."""
    num_blocks = num_rows // num_places
    num_chunks = max(1, -(-num_rows // chunk_rows))
    size = -(-num_blocks // num_chunks) * num_places
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _logits(rows_ND: Tensor, head_VD: Tensor) -> Tensor:
    return rows_ND.to(head_VD.dtype) @ head_VD.T


# Logits, labels, which of them exist, the teacher's logits -> the slope of the loss in the logits;
# loss, weight, hit and entropy of each row.
Scorer = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]


@functools.cache
def _scorer(recipe: LossRecipe, num_places: int, *, compiled: bool) -> Scorer:
    """What lies between the two matrix products of a chunk, all of it in fp32.

    Compiled, it passes over the logits a few times; as it stands, some ten times.
    """

    def score(
        logits_NV: Tensor, labels_N: Tensor, exist_N: Tensor, teacher_NV: Tensor | None
    ) -> tuple[Tensor, ...]:
        log_probs_NV = logits_NV.float().log_softmax(-1)
        probs_NV = log_probs_NV.exp()
        label_log_probs_N = log_probs_NV.gather(1, labels_N[:, None])[:, 0]
        weights_N = _row_weights(recipe, label_log_probs_N, exist_N, num_places)
        is_label_NV = torch.arange(logits_NV.shape[1], device=labels_N.device) == labels_N[:, None]
        loss_N = -recipe.cross_entropy * label_log_probs_N
        slope_NV = recipe.cross_entropy * torch.where(is_label_NV, probs_NV - 1, probs_NV)
        if teacher_NV is not None:
            more_loss_N, more_slope_NV = _teacher_terms(recipe, log_probs_NV, teacher_NV)
            loss_N, slope_NV = loss_N + more_loss_N, slope_NV + more_slope_NV
        slope_NV = (slope_NV * weights_N[:, None]).to(logits_NV.dtype)
        hits_N = (logits_NV.argmax(-1) == labels_N) & exist_N
        entropy_N = -(probs_NV * log_probs_NV).sum(-1) * exist_N
        return slope_NV, loss_N * weights_N, weights_N, hits_N, entropy_N

    return torch.compile(score) if compiled else score


def _row_weights(
    recipe: LossRecipe, label_log_probs_N: Tensor, exist_N: Tensor, num_places: int
) -> Tensor:
    exist_XK = exist_N.view(-1, num_places)
    if recipe.weights == DECAY:
        weights_K = torch.exp(-torch.arange(num_places, device=exist_N.device) / recipe.gamma)
        return (exist_XK * weights_K).flatten()
    # The expected number of accepted drafts is a sum over places of products of confidences; its
    # slope in the log of one place's is the sum from that place on.
    alpha = recipe.dpace_alpha
    confidence_XK = (1 - alpha) * label_log_probs_N.exp().view(-1, num_places) + alpha
    reached_XK = torch.where(exist_XK, confidence_XK, 1.0).cumprod(-1) * exist_XK
    return (reached_XK.flip(-1).cumsum(-1).flip(-1) * exist_XK).flatten()


def _teacher_terms(
    recipe: LossRecipe, log_probs_NV: Tensor, teacher_NV: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses by row, and their slopes, of the terms that know the target's distribution."""
    probs_NV = log_probs_NV.exp()
    true_log_probs_NV = teacher_NV.float().log_softmax(-1)
    true_probs_NV = true_log_probs_NV.exp()
    excess_NV = probs_NV - true_probs_NV
    divergence_N = (true_probs_NV * (true_log_probs_NV - log_probs_NV)).sum(-1)
    distance_N = excess_NV.abs().sum(-1) / 2
    signs_NV = excess_NV.sign()
    pull_NV = probs_NV * (signs_NV - (probs_NV * signs_NV).sum(-1, keepdim=True)) / 2
    loss_N = recipe.distillation * divergence_N + recipe.total_variation * distance_N
    return loss_N, recipe.distillation * excess_NV + recipe.total_variation * pull_NV
