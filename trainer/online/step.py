"""One optimizer step: microbatches -> features -> blocks -> loss -> update.

Called by train.py in a loop. The weights of record are fp32; where the target is bf16, a bf16 copy
of them computes, made anew in each step, and its gradients are summed in fp32. Numerators of all
microbatches are summed and divided by the weight of all of them once, so that the split into
microbatches changes nothing but rounding. The learning rate is a pure function of the step.
Invariant: no step is done before leaks.py has let the drafter pass. Source: arXiv 2602.06036,
section 4.2 (AdamW, cosine with warm-up, clipping at 1.0).

B batch, L context length, A anchors, K block size, D hidden.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.blocks import BlockBatch, padded_positions
from trainer.drafter.leaks import ProbeShape, check_leaks
from trainer.drafter.loss import LossRecipe, LossSums
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
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

    loss: float  # weighted mean of the recipe's loss, nats
    accuracy_by_place: list[float]  # of the drafts for anchor + 1, anchor + 2, ...
    accept_length: float  # tokens per verify step that the blocks would give, the target's included
    entropy: float  # of the drafter's distributions, mean, nats
    gradient_norm: float  # before clipping
    learning_rate: float


class Stepper:
    """A drafter, its frozen target and its optimizer. `drafter` and `optimizer` are what a
    checkpoint keeps; they may be filled at any time between steps.
    """

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
        dtype = target.head_VD.dtype
        is_same = drafter.fc.weight.dtype == dtype
        self._worker = drafter if is_same else copy.deepcopy(drafter).to(dtype)
        ends = TargetEnds(target.embed, target.head_VD)
        self._objective = Objective(self._worker, ends, loss)
        self._is_checked = False

    def step(self, microbatches: Sequence[MicroBatch], *, at: int, num_steps: int) -> StepMetrics:
        """Update the drafter once; `at` counts from 0. Raises Permanent before the first step of a
        drafter that leaks.
        """
        rate = learning_rate(self._recipe, at, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        self._take_weights()
        if not self._is_checked:
            self._check(microbatches[0])
        sums = []
        for microbatch in microbatches:
            part = self.loss_sums(microbatch)
            torch.autograd.backward(part.numerator)
            self._give_gradients()
            sums.append(part)
        weight = torch.stack([s.weight for s in sums]).sum().clamp_min(1e-9)
        norm = self._scale_gradients(weight)
        self.optimizer.step()
        return _metrics(sums, weight, norm, rate)

    def loss_sums(self, batch: MicroBatch) -> LossSums:
        """The loss of one microbatch, not yet divided by its weight."""
        positions_BL = padded_positions(batch.lengths_B, batch.ids_BL.shape[1])
        blocks = BlockBatch(batch.ids_BL, positions_BL, batch.anchors_BA)
        if not self._loss.needs_teacher:
            return self._objective.loss_sums(self._features.of(batch), blocks)
        features_BLF, teacher_BLD = self._target.features_and_states(batch.ids_BL)
        return self._objective.loss_sums(features_BLF, blocks, teacher_BLD=teacher_BLD)

    def _check(self, batch: MicroBatch) -> None:
        num_rows, row_len = batch.ids_BL.shape
        shape = ProbeShape(num_rows, row_len, batch.anchors_BA.shape[1], batch.ids_BL.device)
        check_leaks(self._objective.block_states, self.drafter.config, shape)
        self._is_checked = True

    @torch.no_grad()
    def _take_weights(self) -> None:
        if self._worker is not self.drafter:
            for ours, theirs in self._pairs():
                theirs.copy_(ours)

    def _give_gradients(self) -> None:
        """Add the worker's gradients to those of the weights of record."""
        if self._worker is self.drafter:
            return
        for ours, theirs in self._pairs():
            if theirs.grad is not None:
                gradient = theirs.grad.to(ours.dtype)
                ours.grad = gradient if ours.grad is None else ours.grad.add_(gradient)
                theirs.grad = None

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return list(zip(self.drafter.parameters(), self._worker.parameters(), strict=True))

    def _scale_gradients(self, weight: Tensor) -> Tensor:
        """Divide by the weight and clip, in one pass; the norm before clipping."""
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / weight
        scale = (self._recipe.clip_norm / (norm + 1e-6)).clamp_max(1.0) / weight
        for gradient in gradients:
            gradient *= scale
        return norm


def learning_rate(recipe: OptimizerRecipe, at: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine to zero."""
    num_warmup = math.ceil(recipe.warmup_share * num_steps)
    if at < num_warmup:
        return recipe.learning_rate * (at + 1) / num_warmup
    done = (at - num_warmup) / max(1, num_steps - num_warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _metrics(sums: list[LossSums], weight: Tensor, norm: Tensor, rate: float) -> StepMetrics:
    scored_K = torch.stack([s.scored_K for s in sums]).sum(0)
    correct_K = torch.stack([s.correct_K for s in sums]).sum(0)
    num_blocks = torch.stack([s.num_blocks for s in sums]).sum().clamp_min(1)
    num_accepted = torch.stack([s.num_accepted for s in sums]).sum()
    entropy = torch.stack([s.entropy for s in sums]).sum()
    numerator = torch.stack([s.numerator.detach() for s in sums]).sum()
    return StepMetrics(
        loss=float(numerator / weight),
        accuracy_by_place=(correct_K / scored_K.clamp_min(1)).tolist(),
        accept_length=1 + float(num_accepted / num_blocks),
        entropy=float(entropy / scored_K.sum().clamp_min(1)),
        gradient_norm=float(norm),
        learning_rate=rate,
    )
