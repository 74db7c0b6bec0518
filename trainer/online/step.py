"""One optimizer step: microbatches with their features -> blocks -> loss -> update.

Called by train.py in a loop. The weights of record are fp32; where the target is bf16, a bf16 copy
of them computes, made anew in each step, and its gradients are summed in fp32. Numerators of all
microbatches of all ranks are summed and divided by the weight of all of them once, so that the
split into microbatches and ranks changes nothing but rounding. The learning rate is a pure function
of the step. Invariants: no step is done before leaks.py has let the drafter pass; what is not
finite updates nothing. Source: arXiv 2602.06036, section 4.2 (AdamW, cosine with warm-up, clipping
at 1.0).

B batch, L context length, F features of the target, D hidden, K block size.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_workers.contract.errors import BadInput
from trainer.drafter.blocks import BlockBatch
from trainer.drafter.leaks import ProbeShape, check_leaks
from trainer.drafter.loss import LossRecipe, LossSums
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.online.batches import MicroBatch
from trainer.online.gradients import GradientSums, SumOver
from trainer.online.sharding import ShardedGradients, ShardedObjective
from trainer.online.stopwatch import DRAFTER, OPTIMIZER, Stopwatch


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """AdamW and its schedule."""

    learning_rate: float  # at the peak; paper: 6e-4
    warmup_share: float = 0.04  # of all steps; the paper's
    clip_norm: float = 1.0  # the paper's
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    recompute: bool = False  # each layer's activations in the backward: less memory, more time

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.clip_norm <= 0 or not 0 <= self.warmup_share < 1:
            raise BadInput(f"{self}: out of range")


class Fed(NamedTuple):
    """A microbatch and what the target says of it."""

    batch: MicroBatch
    features_BLF: Tensor
    teacher_BLD: Tensor | None  # final states, for losses that need them
    work: float = 0.0  # operations that it asks of target and drafter


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step saw, over all ranks."""

    loss: float  # weighted mean of the recipe's loss, nats
    accuracy_by_place: list[float]  # of the drafts for anchor + 1, anchor + 2, ...
    accept_length: float  # tokens per verify step that the blocks would give, the target's included
    entropy: float  # of the drafter's distributions, mean, nats
    gradient_norm: float  # before clipping
    learning_rate: float
    num_tokens: int  # without padding
    work: float  # operations, of target and drafter

    @property
    def is_finite(self) -> bool:
        """Whether the step was done: one that is not finite changes no weight."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """The other ranks that have a drafter; by default there are none."""

    sum_over: SumOver = lambda _tensor: None
    shards: dist.ProcessGroup | None = None  # who shares one drafter; None: each has its own


class Stepper:
    """A drafter and its optimizer. `drafter` and `optimizer` are what a checkpoint keeps; they may
    be filled at any time between steps. `ends` decide the type that computes.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        *,
        loss: LossRecipe,
        optimizer: OptimizerRecipe,
        others: Others | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.drafter = drafter
        self.device = drafter.fc.weight.device
        self._recipe = optimizer
        self._others = others or Others()
        self._stopwatch = stopwatch or Stopwatch(self.device)
        self._is_checked = False
        self._gradients: GradientSums | ShardedGradients
        if self._others.shards is not None:
            self.worker = drafter
            self._objective: Objective = ShardedObjective(drafter, ends, loss, self._others.shards)
            self._gradients = ShardedGradients(drafter)
        else:
            dtype = ends.head_VD.dtype
            is_same = drafter.fc.weight.dtype == dtype
            self.worker = drafter if is_same else copy.deepcopy(drafter).to(dtype)
            self._objective = Objective(self.worker, ends, loss)
            self._gradients = GradientSums(drafter.parameters(), self._others.sum_over)
        if optimizer.recompute:
            _recompute_layers(self.worker)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self, microbatches: Iterable[Fed], *, at: int, num_steps: int) -> StepMetrics:
        """Update the drafter once; `at` counts from 0. Microbatches are asked for one by one, the
        next when the one before is done with. Raises Permanent before the first step of a drafter
        that leaks.
        """
        rate = learning_rate(self._recipe, at, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._gradients.clear()
        self._take_weights()
        sums = torch.zeros(self._num_sums, dtype=torch.float64, device=self.device)
        num_tokens, work = 0, 0.0  # on the host: a copy for each microbatch would wait for the GPU
        for fed in microbatches:
            if not self._is_checked:
                self._check(fed.batch)
            with self._stopwatch.phase(DRAFTER):
                part = self.loss_sums(fed)
                torch.autograd.backward(part.numerator)
                if isinstance(self._gradients, GradientSums) and self.worker is not self.drafter:
                    self._gradients.take_from(self.worker.parameters())
                sums += _packed(part)
            num_tokens += fed.batch.num_tokens
            work += fed.work
        with self._stopwatch.phase(OPTIMIZER):
            counts = torch.tensor((num_tokens, work), dtype=torch.float64).to(self.device)
            return self._update(torch.cat((counts, sums)), rate)

    def loss_sums(self, fed: Fed) -> LossSums:
        """The loss of one microbatch, not yet divided by its weight."""
        batch = fed.batch
        blocks = BlockBatch(batch.ids_BL, batch.positions_BL, batch.anchors_BA)
        return self._objective.loss_sums(fed.features_BLF, blocks, teacher_BLD=fed.teacher_BLD)

    @contextmanager
    def ready_to_draft(self) -> Iterator[Drafter]:
        """The drafter in the type that computes, with the weights of record; of a sharded one all
        ranks enter together.
        """
        if isinstance(self._objective, ShardedObjective):
            with self._objective.gathered():
                yield self.worker
            return
        self._take_weights()
        yield self.worker

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Make the copy that computes equal to the weights of record."""
        if self.worker is not self.drafter:
            pairs = zip(self.drafter.parameters(), self.worker.parameters(), strict=True)
            for ours, theirs in pairs:
                theirs.copy_(ours)

    @property
    def _num_sums(self) -> int:
        return len(_SCALARS) + 2 * self.drafter.config.num_drafts

    def _check(self, batch: MicroBatch) -> None:
        num_rows, row_len = batch.ids_BL.shape
        shape = ProbeShape(num_rows, row_len, batch.anchors_BA.shape[1], batch.ids_BL.device)
        check_leaks(self._objective.block_states, self.drafter.config, shape)
        self._is_checked = True

    def _update(self, sums: Tensor, rate: float) -> StepMetrics:
        self._gradients.sum_over_ranks()
        self._others.sum_over(sums)
        weight = sums[_NUM_COUNTS + _SCALARS.index("weight")].float().clamp_min(1e-9)
        norm = self._gradients.norm() / weight
        metrics = _metrics(torch.cat((sums, norm[None].double())).tolist(), rate)
        if metrics.is_finite:
            self._gradients.scale((self._recipe.clip_norm / (norm + 1e-6)).clamp_max(1.0) / weight)
            self.optimizer.step()
        return metrics


def learning_rate(recipe: OptimizerRecipe, at: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine to zero."""
    num_warmup = math.ceil(recipe.warmup_share * num_steps)
    if at < num_warmup:
        return recipe.learning_rate * (at + 1) / num_warmup
    done = (at - num_warmup) / max(1, num_steps - num_warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


_SCALARS = ("numerator", "weight", "num_accepted", "num_blocks", "entropy")
_NUM_COUNTS = 2  # tokens and work, before all else


def _packed(sums: LossSums) -> Tensor:
    """What is summed on the device, in one tensor: _SCALARS, correct and scored drafts by place."""
    scalars = [getattr(sums, name).detach().double() for name in _SCALARS]
    return torch.cat((torch.stack(scalars), sums.correct_K.double(), sums.scored_K.double()))


def _metrics(summed: list[float], rate: float) -> StepMetrics:
    num_tokens, work, *summed, norm = summed
    numerator, weight, num_accepted, num_blocks, entropy = summed[: len(_SCALARS)]
    by_place = summed[len(_SCALARS) :]
    correct, scored = by_place[: len(by_place) // 2], by_place[len(by_place) // 2 :]
    return StepMetrics(
        loss=numerator / max(weight, 1e-9),
        accuracy_by_place=[c / max(s, 1) for c, s in zip(correct, scored, strict=True)],
        accept_length=1 + num_accepted / max(num_blocks, 1),
        entropy=entropy / max(sum(scored), 1),
        gradient_norm=norm,
        learning_rate=rate,
        num_tokens=int(num_tokens),
        work=work,
    )


def _recompute_layers(drafter: Drafter) -> None:
    for layer in drafter.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
