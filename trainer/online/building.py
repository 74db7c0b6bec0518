"""What a rank trains with: target, drafter and the state to go on from.

Used by train.py once, before the first step. Every rank builds its own part: a target, a drafter,
or both. Invariant: all drafters begin with the leader's weights and optimizer, whatever they were
built with.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.records import Json, encode
from trainer.drafter.config import DrafterConfig
from trainer.drafter.fitting import drafter_config
from trainer.drafter.model import Drafter
from trainer.drafter.objective import TargetEnds
from trainer.drafter.published import read_published, read_published_config
from trainer.drafter.start import Start, untrained_drafter
from trainer.online.batches import Place
from trainer.online.checkpoint import (
    TrainState,
    fill_optimizer,
    read_optimizer,
    restore_weights,
)
from trainer.online.colocated import Eyes
from trainer.online.features import Features
from trainer.online.ranks import Ranks
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.sharding import parts_like
from trainer.online.splitting import target_group, whole_layers
from trainer.online.step import Others, Stepper
from trainer.online.stopwatch import Stopwatch
from trainer.online.target import FrozenTarget, load_target, target_config
from trainer.online.topology import Launch
from trainer.online.walk import Walk
from trainer.online.work import TargetSize, target_size

# What may differ between a run's stops: it decides no weight.
KEEPING = ("topology", "save_every", "num_kept", "evaluate_every", "num_evaluated")

# What a drafter has of its target's shape.
MUST_FIT = ("hidden_size", "vocab_size", "num_target_layers")


def device_of(launch: Launch) -> torch.device:
    """This rank's: the GPUs in turn, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def first_state(job: TrainJob, walk: Walk, provenance: Json) -> TrainState:
    """Of a run that begins. Raises BadInput where its schedule has no length yet."""
    target = target_config(job.model_dir)
    config = drafter_config(target, job.recipe.drafter, job.model_dir)
    if job.start_from:
        config = _published_config(job.start_from, config)
    config_file = Path(job.model_dir) / "config.json"
    facts = {
        "target": Path(job.model_dir).resolve().name,
        "target_config_sha256": hashlib.sha256(config_file.read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "start_from": job.start_from.resolve().name if job.start_from else None,
        "versions": {name: version(name) for name in ("dflash-fleet", "torch", "transformers")},
    }
    return TrainState(
        step=0,
        num_steps=_num_steps(job.recipe, walk),
        place=Place(seed=job.recipe.seed),
        config=config,
        recipe=encode(job.recipe),
        corpus_digest=walk.digest(),
        first_loss=0.0,
        last_loss=0.0,
        seconds=0.0,
        provenance={**provenance, **facts},
    )


def check_same(state: TrainState, walk: Walk, job: TrainJob) -> None:
    """Raise Conflict where a folder's run is another one, BadInput where the data are another
    model's.
    """
    began, asked = (_flat(_deciding(r)) for r in (state.recipe, encode(job.recipe)))
    if differing := sorted(key for key in began | asked if began.get(key) != asked.get(key)):
        key = differing[0]
        raise Conflict(
            f"{job.out}: began with {key}={began.get(key)}, not {asked.get(key)}: give it again, "
            "or choose another output folder (--from an export goes on with its weights)"
        )
    if state.corpus_digest != walk.digest():
        raise Conflict(f"{job.out}: holds a run on other samples: choose another output folder")
    if walk.largest_id() >= state.config.vocab_size:
        raise BadInput(
            f"the samples hold id {walk.largest_id()}, the target knows "
            f"{state.config.vocab_size}: they are another model's"
        )


def _flat(tree: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


class Built:
    """A rank's models: `eyes` where it has a target's layers, `stepper` where it has a drafter."""

    def __init__(
        self, job: TrainJob, state: TrainState, found: Path | None, ranks: Ranks, watch: Stopwatch
    ) -> None:
        """`found`: the leader's checkpoint of that state; None: of a run that begins."""
        recipe, device = job.recipe, ranks.device
        self.watch = watch
        self.needs_teacher = recipe.loss.needs_teacher
        # bf16 is what the target is served in; a CPU computes it many times slower than fp32.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = self.open_target(job, state.config, ranks)
        drafter = self.open_drafter(job, state.config, target) if ranks.has_drafter else None
        if not self.needs_teacher:
            target.cut()
        self.target_size: TargetSize = target_size(target)
        if not _runs_target(ranks):
            del target.layers[:]
            target.model.to(device)
        self.ends = TargetEnds(target.embed, target.head_VD)
        self.eyes: Eyes | None = None
        if _runs_target(ranks):
            features = Features(target, recipe.data.keep_features_mb)
            self.eyes = Eyes(features, needs_teacher=self.needs_teacher)
        self.stepper: Stepper | None = None
        if drafter:
            self.stepper = self._stepper(drafter.to(device), job, state, found, ranks)

    def open_target(self, job: TrainJob, config: DrafterConfig, ranks: Ranks) -> FrozenTarget:
        """The whole target; on the host where none of its layers will run. Raises Missing and
        BadInput.
        """
        return load_target(
            job.model_dir,
            config.target_layer_ids,
            dtype=self.dtype,
            device=ranks.device if _runs_target(ranks) else torch.device("cpu"),
            recipe=job.recipe.target,
            group=target_group(ranks),
        )

    def open_drafter(self, job: TrainJob, config: DrafterConfig, target: FrozenTarget) -> Drafter:
        """As training begins; `target` is whole, or this rank's part of a whole one."""
        if job.start_from:
            drafter = Drafter(config)
            drafter.load_state_dict(read_published(job.start_from)[1])
            return drafter
        start = Start(job.recipe.seed, job.recipe.drafter.copy_target_layers)
        layers = target.layers
        if start.copies_target:
            layers = whole_layers(layers, config.num_layers)
        return untrained_drafter(config, start, layers, target.norm)

    def _stepper(
        self, drafter: Drafter, job: TrainJob, state: TrainState, found: Path | None, ranks: Ranks
    ) -> Stepper:
        """With the leader's weights and optimizer."""
        recipe = job.recipe
        torch.manual_seed(recipe.seed)
        if found:
            restore_weights(found, drafter)
        ranks.spread(p.data for p in drafter.parameters())
        stepper = Stepper(
            drafter,
            self.ends,
            loss=recipe.loss,
            optimizer=recipe.optimizer,
            others=Others(
                ranks.sum_over_drafters,
                ranks.drafter_group if recipe.topology.shard_drafter else None,
            ),
            stopwatch=self.watch,
        )
        if state.step:
            whole = read_optimizer(found) if found else _unknown_optimizer(drafter, state.step)
            if recipe.topology.shard_drafter:
                whole = parts_like(drafter, whole)
            else:
                ranks.spread(whole[name] for name in sorted(whole))
            fill_optimizer(drafter, stepper.optimizer, whole)
        return stepper


def _published_config(folder: Path, fitted: DrafterConfig) -> DrafterConfig:
    """Of a published drafter. Raises Conflict where it was made for a target of another shape."""
    config = read_published_config(folder)
    for name in MUST_FIT:
        ours, theirs = getattr(fitted, name), getattr(config, name)
        if ours != theirs:
            raise Conflict(f"{folder}: its {name} is {theirs}, this target's {ours}")
    return config


def _runs_target(ranks: Ranks) -> bool:
    return not (ranks.topology.is_paired and ranks.has_drafter)


def _num_steps(recipe: TrainRecipe, walk: Walk) -> int:
    if recipe.num_steps:
        return recipe.num_steps
    total = walk.total_microbatches(recipe.num_epochs)
    if total is None:
        raise BadInput(
            f"{recipe.num_epochs} epochs of a run that still grows have no length: seal its plan "
            "and wait until all is tokenized, or pass --steps"
        )
    return -(-total // recipe.num_microbatches)


def _deciding(recipe: Json) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in KEEPING}


def _unknown_optimizer(drafter: Drafter, step: int) -> dict[str, torch.Tensor]:
    """Of the right names and shapes, to be filled by the leader's."""
    return {
        f"{name}/{key}": torch.tensor(float(step)) if key == "step" else torch.zeros(p.shape)
        for name, p in drafter.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
