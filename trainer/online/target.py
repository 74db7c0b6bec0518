"""The frozen target: the model whose answers are the data, and whose states the drafter reads.

Loaded from a local folder, never from a hub. For training it is cut behind the last layer that is
listened to: gives features, embedding and head. drafter/speculate.py uses it whole. Invariant:
feature i is the residual stream AFTER decoder layer `layer_ids[i]` (0-based), without a norm: the
output of that layer, transformers' `hidden_states[id + 1]`; the features of the layers are joined
in ascending order of their ids. Source: the published drafters' readers do the same. In a row of
several documents each has the features that it has alone: transformers masks by the positions,
which restart with each, as long as it is given no attention mask and keeps no cache. Recurrent
layers don't look at positions: features.py gives those one document a row. Of a target that is
split over ranks (splitting.py) every one of them has all features.

B batch, L context length, D hidden, F features (layers * D), V vocab.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from dflash_workers.contract.errors import BadInput, Missing
from trainer.online.splitting import SplitLoader

# Layer types that look at what the mask shows and at nothing else.
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Not flash attention: transformers sees a row's documents there in batches of one row only.
ATTENTIONS = ("auto", "sdpa", "eager", "flex_attention")


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """How the target computes; what it computes is the run's."""

    attention: str = "auto"  # sdpa where the model has it; flex skips what a row's mask hides
    is_compiled: bool = False  # layer by layer, for CUDA and rows of one length

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise BadInput(f"attention {self.attention!r}: use one of {', '.join(ATTENTIONS)}")


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

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer's state runs over the documents of a row, whatever their positions."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        return bool(self.model._is_stateful) or not kinds <= MASKED_LAYERS

    @torch.no_grad()
    def features(self, ids_BL: Tensor, positions_BL: Tensor | None = None) -> Tensor:
        """[B, L, F]. Without positions a row is one document with padding behind it: the target is
        causal, so that no real token sees the padding, and what the padding's own features are
        matters to nobody. `positions_BL` restart with each document of a row.
        """
        return self.features_and_states(ids_BL, positions_BL)[0]

    @torch.no_grad()
    def features_and_states(
        self, ids_BL: Tensor, positions_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`features`, and the final states that the head reads, [B, L, D]; the latter mean
        something on a whole target only.
        """
        decoder = self.model.get_decoder()
        output = decoder(input_ids=ids_BL, position_ids=positions_BL, use_cache=False)
        return self.take_features(), output.last_hidden_state

    def take_features(self) -> Tensor:
        """[B, L, F] of the forward that has just run; to be taken once."""
        return torch.cat([self.tapped.pop(i) for i in self.layer_ids], dim=-1)

    def cut(self) -> None:
        """Drop the layers behind the last tapped one: from here on it gives features only."""
        del self.layers[self.layer_ids[-1] + 1 :]


def load_target(
    model_dir: str,
    layer_ids: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    recipe: TargetRecipe | None = None,
    group: dist.ProcessGroup | None = None,
) -> FrozenTarget:
    """A model folder, frozen; of a `group`, whose ranks all call this, each rank's part. Raises
    Missing, BadInput.
    """
    recipe = recipe or TargetRecipe()
    options: dict[str, Any] = {"dtype": dtype}
    if recipe.attention != "auto":
        options["attn_implementation"] = recipe.attention
    loader: Any = AutoModelForCausalLM
    if group is not None:
        loader = SplitLoader(group, device)
    model = _read(loader, model_dir, use_safetensors=True, **options)
    if group is None:
        model.to(device)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise BadInput(f"{model_dir}: an output head with a bias is not supported")
    return tapped(model, layer_ids, is_compiled=recipe.is_compiled)


def tapped(model: Any, layer_ids: list[int], *, is_compiled: bool = False) -> FrozenTarget:
    """A model as it stands, frozen and tapped."""
    model.eval().requires_grad_(False)
    target = FrozenTarget(model, layer_ids, {})
    if is_compiled:
        for layer in target.layers:  # not the whole: the layers share their code, and one graph
            layer.forward = torch.compile(layer.forward)
    for layer_id in layer_ids:
        target.layers[layer_id].register_forward_hook(
            functools.partial(_keep, target.tapped, layer_id)
        )
    return target


def target_config(model_dir: str) -> PreTrainedConfig:
    """The configuration of a model folder. Raises Missing, BadInput."""
    return _read(AutoConfig, model_dir)


def _read(loader: Any, model_dir: str, **options: Any) -> Any:
    if not (Path(model_dir) / "config.json").is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no config.json: pass --model FOLDER")
    logging.disable_progress_bar()  # transformers' own; our verbs have theirs
    try:
        return loader.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"{model_dir}: model can't be loaded: {error}") from error


def _keep(tapped: dict[int, Tensor], layer_id: int, _layer: Any, _args: Any, output: Any) -> None:
    tapped[layer_id] = output[0] if isinstance(output, tuple) else output
