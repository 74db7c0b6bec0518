"""How a drafter begins: at random, or as a copy of the target's last layers.

Used by online/train.py before the first step, on the whole target (its last layers are dropped for
training), and by evaluate.py for the drafter to compare with. A copy already speaks the language of
the target's residual stream and head, and learns faster where its shape fits. Invariant: a Start
decides every weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import DrafterConfig
from trainer.drafter.heads import MarkovHead
from trainer.drafter.model import Drafter

RANDOM_STD = 0.02  # the initializer_range of the format's config


@dataclass(frozen=True, slots=True)
class Start:
    """Decides every weight of an untrained drafter."""

    seed: int = 0
    copies_target: bool = False


def untrained_drafter(
    config: DrafterConfig, start: Start, layers: nn.ModuleList, norm: nn.Module
) -> Drafter:
    """The drafter that training begins with; `layers` and `norm` are the whole target's."""
    drafter = Drafter(config)
    start_at_random(drafter, start.seed)
    if start.copies_target:
        copy_target_layers(drafter, layers, norm)
    return drafter


def start_at_random(drafter: Drafter, seed: int) -> None:
    """Normal projections, zero biases, unit norms; a head's correction begins at nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            random = torch.empty(parameter.shape).normal_(std=RANDOM_STD, generator=generator)
            parameter.data.copy_(random)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    if isinstance(drafter.markov_head, MarkovHead):
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)


def copy_target_layers(drafter: Drafter, layers: nn.ModuleList, norm: nn.Module) -> None:
    """The target's last layers and norms; `fc` passes the last feature through.

    The first copied layer so reads a feature as it reads the stream before it in the target.

    What the target lacks (q and k norms, where it has none) stays as it was. Raises BadInput where
    the target's layers have another shape.
    """
    num_layers = drafter.config.num_layers
    for ours, theirs in zip(drafter.layers, layers[-num_layers:], strict=True):
        _copy(ours, theirs)
    _copy(drafter.hidden_norm, layers[-num_layers].get_submodule("input_layernorm"))
    _copy(drafter.norm, norm)
    hidden_size = drafter.config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden_size:] = torch.eye(hidden_size)


def _copy(ours: nn.Module, theirs: nn.Module) -> None:
    source = {k: v for k, v in theirs.state_dict().items() if k in ours.state_dict()}
    if not source or any(v.shape != ours.state_dict()[k].shape for k, v in source.items()):
        raise BadInput("the target's layers don't fit this drafter: start at random")
    ours.load_state_dict(source, strict=False)
