"""One optimizer step: microbatches -> features -> blocks -> loss -> update.

Called by train.py in a loop. The numerators of all microbatches are summed and divided by the
weight of all of them once, so that the split into microbatches changes nothing but rounding. The
learning rate is a pure function of the step. Source: arXiv 2602.06036, section 4.2 (AdamW, cosine
with warm-up, clipping at 1.0).

B batch, L context length, A anchors, K block size, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.loss import LossRecipe, LossSums, block_labels, block_loss, place_weights
from trainer.drafter.model import Drafter
from trainer.online.batches import MicroBatch
from trainer.online.features import Features
from trainer.online.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """AdamW and its schedule."""

    learning_rate: float  # at the peak; paper: 6e-4
    warmup_share: float = 0.04  # of all steps; the paper's
    clip_norm: float = 1.0  # the paper's
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.clip_norm <= 0 or not 0 <= self.warmup_share < 1:
            raise BadInput(f"{self}: out of range")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step saw."""

    loss: float  # weighted mean cross-entropy, nats
    accuracy_by_place: list[float]  # of the drafts for anchor + 1, anchor + 2, ...
    gradient_norm: float  # before clipping
    learning_rate: float


class Stepper:
    """A drafter, its frozen target and its optimizer."""

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        features: Features,
        *,
        loss: LossRecipe,
        optimizer: OptimizerRecipe,
    ) -> None:
        self.drafter = drafter
        self._target = target
        self._features = features
        self._loss = loss
        self._recipe = optimizer
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._weights_K = place_weights(
            drafter.config.block_size, loss.gamma, drafter.fc.weight.device
        )

    def step(self, microbatches: Sequence[MicroBatch], *, at: int, num_steps: int) -> StepMetrics:
        """Update the drafter once; `at` counts from 0."""
        rate = learning_rate(self._recipe, at, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        sums = []
        for microbatch in microbatches:
            part = self.loss_sums(microbatch)
            torch.autograd.backward(part.numerator)
            sums.append(part)
        weight = torch.stack([s.weight for s in sums]).sum().clamp_min(1e-9)
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None  # for the type checker
            parameter.grad /= weight
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._recipe.clip_norm)
        self.optimizer.step()
        return _metrics(sums, weight, norm, rate)

    def loss_sums(self, batch: MicroBatch) -> LossSums:
        """The loss of one microbatch, not yet divided by its weight."""
        features_BLF = self._features.of(batch)
        embedded_BQD = self._target.embed(self.drafter.block_ids(batch.ids_BL, batch.anchors_BA))
        with torch.autocast(features_BLF.device.type, torch.bfloat16, enabled=features_BLF.is_cuda):
            context = self.drafter.read_context(features_BLF)
            hidden_BQD = self.drafter(embedded_BQD, context, batch.anchors_BA)
        hidden_BAKD = hidden_BQD.unflatten(1, (-1, self.drafter.config.block_size))
        labels = block_labels(
            batch.ids_BL, batch.lengths_B, batch.anchors_BA, weights_K=self._weights_K
        )
        head_VD = self._target.head_VD
        return block_loss(hidden_BAKD, labels, head_VD, chunk_rows=self._loss.chunk_rows)


def learning_rate(recipe: OptimizerRecipe, at: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine to zero."""
    num_warmup = math.ceil(recipe.warmup_share * num_steps)
    if at < num_warmup:
        return recipe.learning_rate * (at + 1) / num_warmup
    done = (at - num_warmup) / max(1, num_steps - num_warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _metrics(sums: list[LossSums], weight: Tensor, norm: Tensor, rate: float) -> StepMetrics:
    numerator = torch.stack([s.numerator.detach() for s in sums]).sum()
    correct_K = torch.stack([s.correct_K for s in sums]).sum(0)
    scored_K = torch.stack([s.scored_K for s in sums]).sum(0).clamp_min(1)
    return StepMetrics(
        loss=float(numerator / weight),
        accuracy_by_place=(correct_K / scored_K).tolist(),
        gradient_norm=float(norm),
        learning_rate=rate,
    )
