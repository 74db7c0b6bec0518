"""A target that is split over the ranks of a group: tensor parallelism by transformers' own plan.

Used by target.py to load a target that doesn't fit on one GPU, and by building.py. transformers
would have all ranks of a job be one model; here a group's are, whatever the others do. Each rank
reads its part of the weights only. Embedding and head are whole on every rank, so that a drafter
finds them there. Invariants: a layer's output is whole on each rank, because a plan ends every part
of a layer with a sum or a gathering over the group; all ranks of a group run the target on the same
tokens in the same order.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from dflash_workers.contract.errors import BadInput
from trainer.online.ranks import Ranks

WHOLE = "replicate"  # transformers' word for what every rank has


def target_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Of the ranks that have one target with this one; None where it has a whole one, or none. All
    ranks of the job call it, once. Raises Transient where one is gone.
    """
    if ranks.topology.ranks_per_target == 1:
        return None
    mine = None
    with ranks.translated():
        for members in ranks.topology.targets():  # every rank is asked about every group
            group = dist.new_group(list(members))
            if ranks.rank in members:
                mine = group
    return mine


class SplitLoader:
    """Stands in for AutoModelForCausalLM; all ranks of the group load together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def from_pretrained(self, model_dir: str, **options: Any) -> Any:
        """This rank's part of the model, on its device.

        Raises BadInput where transformers has no plan for the model or its heads can't be divided,
        and what transformers raises.
        """
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
        num_parts = self._group.size()
        _check_parts(shape, num_parts)
        ends = (shape.get_input_embeddings(), shape.get_output_embeddings())
        names = [name for name, part in shape.named_modules() if any(part is end for end in ends)]
        plan = DistributedConfig(tp_size=num_parts, tp_plan=dict.fromkeys(names, WHOLE))
        mesh = DeviceMesh.from_group(self._group, self._device.type, mesh_dim_names=("tp",))
        loader: Any = _loading_over(type(shape), _GroupMesh(mesh), self._device)
        return loader.from_pretrained(model_dir, distributed_config=plan, **options)


def whole_layers(layers: nn.ModuleList, num: int) -> nn.ModuleList:
    """Copies of the last layers with all of their weights; all ranks of the group call it."""
    last = layers[-num:]
    whole = {  # what deepcopy is to put in the place of a part
        id(part): nn.Parameter(part.full_tensor(), requires_grad=False)
        for part in last.parameters()
        if isinstance(part, DTensor)
    }
    return copy.deepcopy(last, whole)


class _GroupMesh:
    """What transformers asks a mesh manager for: one group, whatever dimensions are asked for."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_mesh(self, _dims: str | tuple[str, ...]) -> DeviceMesh:
        return self._mesh


def _loading_over(model_class: type, mesh: _GroupMesh, device: torch.device) -> type:
    """The class, but for its mesh: transformers makes one of all ranks that there are."""

    def prepare(
        _class: type, config: DistributedConfig, device_map: object = None
    ) -> tuple[DistributedConfig, torch.device, _GroupMesh]:
        return config, device, mesh

    # transformers looks for a model's source, and its weights' former names, by these names.
    members = {
        "prepare_distribute_model": classmethod(prepare),
        "__module__": model_class.__module__,
    }
    return type(model_class.__name__, (model_class,), members)


def _check_parts(shape: Any, num_parts: int) -> None:
    kind = shape.config.model_type
    if not any("layers." in rule for rule in shape.tp_plan):
        raise BadInput(
            f"transformers has no tensor-parallel plan for {kind}: --set "
            "topology.num_ranks_per_target=1"
        )
    text = shape.config.get_text_config()
    for name, num_heads in (
        ("query", text.num_attention_heads),
        ("key and value", text.num_key_value_heads),
    ):
        if num_heads % num_parts:
            raise BadInput(
                f"{kind} has {num_heads} {name} heads, which {num_parts} ranks can't share: --set "
                "topology.num_ranks_per_target"
            )
