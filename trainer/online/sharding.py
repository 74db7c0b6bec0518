"""A drafter whose weights, gradients and optimizer are divided among the drafters' ranks: FSDP2.

Used by step.py where the recipe asks for it, for drafters that don't fit beside their optimizer.
All of the drafter is one unit: gathered in the type that computes before its way through a batch,
given back after it, its gradients summed over ranks as they are divided. The unit is a module
around the compiled way, so that what is compiled sees plain weights. Invariant: gradients are sums,
never means, as everywhere here.

B batch, L context length, Q queries, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds


class _Way(nn.Module):
    """A drafter's way through a batch, as a module."""

    def __init__(self, drafter: Drafter, through: Any) -> None:
        super().__init__()
        self.drafter = drafter
        self._through = through

    def forward(self, *inputs: Any) -> Tensor:
        states_BQD: Tensor = self._through(self.drafter, *inputs)
        return states_BQD


class ShardedObjective(Objective):
    """Objective of a drafter that is divided from here on among the ranks of a group."""

    def __init__(
        self, drafter: Drafter, ends: TargetEnds, recipe: LossRecipe, group: dist.ProcessGroup
    ) -> None:
        """Every rank brings the whole drafter, with equal weights. Raises BadInput for a head with
        weights of its own, which are used outside of the way.
        """
        super().__init__(drafter, ends, recipe)
        if drafter.config.markov_rank:
            raise BadInput("topology.shard_drafter: a drafter with markov_rank can't be sharded")
        device = drafter.fc.weight.device
        self._way = _Way(drafter, self._through)
        fully_shard(
            self._way,
            mesh=DeviceMesh.from_group(group, device.type),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=ends.head_VD.dtype, reduce_dtype=torch.float32
            ),
        )
        assert isinstance(self._way, FSDPModule)
        self._way.set_gradient_divide_factor(1.0)
        self._way.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sums
        self._through: Any = self._go

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The drafter's weights are whole inside; all ranks enter together."""
        assert isinstance(self._way, FSDPModule)
        self._way.unshard()
        yield
        self._way.reshard()

    def _go(self, _drafter: Drafter, *inputs: Any) -> Tensor:
        states_BQD: Tensor = self._way(*inputs)
        return states_BQD


class ShardedGradients:
    """GradientSums' counterpart: FSDP2 sums and divides them as they come."""

    def __init__(self, drafter: nn.Module) -> None:
        self._parameters = list(drafter.parameters())

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def sum_over_ranks(self) -> None:
        """They are summed already."""

    def norm(self) -> Tensor:
        """Of all ranks' parts together."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return whole(torch.nn.utils.get_total_norm(gradients))

    def scale(self, factor: Tensor) -> None:
        for parameter in self._parameters:
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().mul_(factor)


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts; all of them call it together. Of a plain tensor: itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts_like(drafter: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimizer's whole tensors, divided as their parameters are; the first rank's count."""
    parameters = dict(drafter.named_parameters())
    divided = {}
    for name in sorted(tensors):  # all ranks in one order
        tensor = tensors[name]
        parameter = parameters[name.rpartition("/")[0]]
        if isinstance(parameter, DTensor) and tensor.dim():
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        divided[name] = tensor
    return divided
