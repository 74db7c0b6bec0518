"""The frozen target: the model whose answers are the data, and whose states the drafter reads.

Loaded from a local folder, never from a hub. For training it is cut behind the last layer that is
listened to: gives features, embedding and head. drafter/speculate.py uses it whole. Invariant:
feature i is the residual stream AFTER decoder layer `layer_ids[i]` (0-based), without a norm: the
output of that layer, transformers' `hidden_states[id + 1]`; the features of the layers are joined
in ascending order of their ids. Source: the published drafters' readers do the same.

B batch, L context length, D hidden, F features (layers * D), V vocab.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.records import RunSpec


@dataclass(frozen=True, slots=True, eq=False)
class FrozenTarget:
    """A causal language model of transformers in evaluation mode, tapped behind some layers."""

    model: Any  # a PreTrainedModel; transformers is untyped here
    layer_ids: list[int]
    tapped: dict[int, Tensor]  # the last forward's outputs, by layer id

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.get_decoder().layers
        return layers

    @property
    def norm(self) -> nn.Module:
        """The norm behind the last layer."""
        norm: nn.Module = self.model.get_decoder().norm
        return norm

    @property
    def head_VD(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def embed(self, ids: Tensor) -> Tensor:
        """The target's own embedding."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    @torch.no_grad()
    def features(self, ids_BL: Tensor) -> Tensor:
        """[B, L, F] of a right-padded batch. The target is causal, so that no real token sees the
        padding, and what the padding's own features are matters to nobody.
        """
        return self.features_and_states(ids_BL)[0]

    @torch.no_grad()
    def features_and_states(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """`features`, and the final states that the head reads, [B, L, D]; the latter mean
        something on a whole target only.
        """
        output = self.model.get_decoder()(input_ids=ids_BL, use_cache=False)
        return self.take_features(), output.last_hidden_state

    def take_features(self) -> Tensor:
        """[B, L, F] of the forward that has just run; to be taken once."""
        return torch.cat([self.tapped.pop(i) for i in self.layer_ids], dim=-1)

    def cut(self) -> None:
        """Drop the layers behind the last tapped one: from here on it gives features only."""
        del self.layers[self.layer_ids[-1] + 1 :]


def load_target(
    model_dir: str, layer_ids: list[int], *, dtype: torch.dtype, device: torch.device
) -> FrozenTarget:
    """A model folder, frozen. Raises Missing, BadInput."""
    model = _read(AutoModelForCausalLM, model_dir, dtype=dtype).eval().requires_grad_(False)
    model.to(device)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise BadInput(f"{model_dir}: an output head with a bias is not supported")
    target = FrozenTarget(model, layer_ids, {})
    for layer_id in layer_ids:
        target.layers[layer_id].register_forward_hook(
            functools.partial(_keep, target.tapped, layer_id)
        )
    return target


def check_target(spec: RunSpec, model_dir: str) -> None:
    """Raise Conflict where a run's answers are another model's."""
    config = Path(model_dir) / "config.json"
    if not config.is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no config.json: pass --model FOLDER")
    if hashlib.sha256(config.read_bytes()).hexdigest() != spec.target.config_sha256:
        raise Conflict(
            f"{model_dir} is not the target of run {spec.run!r} ({spec.target.name}): their "
            "config.json differ: pass the folder that the run was made with"
        )


def target_config(model_dir: str) -> PreTrainedConfig:
    """The configuration of a model folder. Raises Missing, BadInput."""
    return _read(AutoConfig, model_dir)


def _read(loader: Any, model_dir: str, **options: Any) -> Any:
    if not (Path(model_dir) / "config.json").is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no config.json: pass --model FOLDER")
    logging.disable_progress_bar()  # transformers' own; our verbs have theirs
    try:
        return loader.from_pretrained(model_dir, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise BadInput(f"{model_dir}: model can't be loaded: {error}") from error


def _keep(tapped: dict[int, Tensor], layer_id: int, _layer: Any, _args: Any, output: Any) -> None:
    tapped[layer_id] = output[0] if isinstance(output, tuple) else output
