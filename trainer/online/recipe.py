"""The whole tree of choices of a training run, and what else it is told: where, and how far.

Read by train.py and all that it calls; trainer/recipes.py has values. Each branch of the tree
stands beside its only reader. Invariant: two runs with equal recipes, data and targets make equal
weights, on any number of ranks and however often they are stopped, to rounding; on the same number,
to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import DrafterShape
from trainer.drafter.loss import LossRecipe
from trainer.online.batches import DataRecipe
from trainer.online.step import OptimizerRecipe
from trainer.online.target import TargetRecipe
from trainer.online.topology import Launch, TopologyRecipe


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """Everything that decides the weights, beside data, target and machine; and how to keep and
    divide the work.
    """

    drafter: DrafterShape
    data: DataRecipe
    loss: LossRecipe
    optimizer: OptimizerRecipe
    target: TargetRecipe = field(default_factory=TargetRecipe)
    topology: TopologyRecipe = field(default_factory=TopologyRecipe)
    num_steps: int = 0  # 0: num_epochs decides
    num_epochs: int = 0  # over a sealed plan whose shards are all there
    num_microbatches: int = 1  # of one step, over all ranks
    save_every: int = 200  # steps
    num_kept: int = 2  # checkpoints, the newest ones; the best one stays beside them
    evaluate_every: int = 0  # steps; a checkpoint is written then, too; 0: never
    num_evaluated: int = 32  # held-out samples
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_microbatches, self.save_every, self.num_kept, self.num_evaluated) < 1:
            raise BadInput(
                "num_microbatches, save_every, num_kept and num_evaluated must be at least 1"
            )
        if min(self.num_steps, self.num_epochs, self.evaluate_every) < 0:
            raise BadInput("num_steps, num_epochs and evaluate_every can't be negative")
        if not self.num_steps and not self.num_epochs:
            raise BadInput(
                "the schedule needs a length: --steps N (num_steps), or num_epochs over a sealed "
                "plan"
            )

    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return step % self.save_every == 0 or self.is_evaluated(step)

    def is_evaluated(self, step: int) -> bool:
        return self.evaluate_every > 0 and step % self.evaluate_every == 0


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A recipe, and where this run of it reads and writes."""

    recipe: TrainRecipe
    model_dir: str  # of the target
    out: Path  # folder of checkpoints, metrics and what else a person may look for
    name: str = ""  # in S3, below train/; empty: the output folder's
    overrides: list[str] = field(default_factory=list)  # rules of the gate that may fail
    start_from: Path | None = None  # a published drafter to begin with
    launch: Launch = field(default_factory=Launch)
    metrics_port: int = 0  # of Prometheus, on loopback; 0: none
    tracker: str = ""  # "wandb" or "trackio": an installed one, set up as its own manual says

    @property
    def stored_name(self) -> str:
        return self.name or self.out.resolve().name
