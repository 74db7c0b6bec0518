"""A drafter that others trained and published, to be trained on: z-lab's and SpecForge's folders.

Read by online/train.py for a run that continues a drafter. z-lab publishes config.json and
model.safetensors; SpecForge's `export` writes the same through transformers, which may say
`rope_parameters` for `rope_theta`, keep a `model.` before each name, and split the weights into
several files. Invariant: what is returned means here what it means in its own code. A key that
changes the meaning and that this model lacks is refused by name, and so is one that nobody knows.
Source: dflash 0.1.0, model.py; specforge 0.2.0, modeling/draft/{dflash,domino,dspark}.py and
export/; SGLang 0.5.23, speculative/dflash_utils.py, for keys of later drafters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.records import Json
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.engines import is_causal_in_block
from trainer.drafter.export import CONFIG, WEIGHTS, tensor_shapes
from trainer.drafter.fitting import spread_layer_ids

INDEX = f"{WEIGHTS}.index.json"
MASK_EMBEDDING = "mask_embedding.pt"  # a row of its own for the mask, which servers put in
PREFIX = "model."
# Tensors that are the target's own, or follow from the configuration.
NOT_THE_DRAFTERS = ("embed_tokens.", "lm_head.", "rotary_emb.")

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel")
READ = {
    "architectures",
    "block_size",
    "dflash_config",
    "layer_types",
    "is_causal",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "attention_bias",
    "sliding_window",
    "use_sliding_window",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "vocab_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "hidden_act",
}
# Keys that change nothing of what the drafter computes.
IDLE = {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Of `dflash_config`: what is read, and what is idle at these values.
READ_INSIDE = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers"}
IDLE_INSIDE: Json = {
    "projector_type": None,
    "shift_label": False,
    "pure_draft_prefix_len": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "attention_mode": "gqa",
}


def read_published(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Its configuration and its tensors, in fp32 on the CPU, named as a Drafter's are.

    Raises Missing, Corrupt where the files are damaged, BadInput where it is no drafter of ours.
    """
    config = read_published_config(folder)
    if (folder / MASK_EMBEDDING).exists():
        raise BadInput(f"{folder}: {MASK_EMBEDDING}: a mask of its own, which is not supported")
    tensors = {_bare(n): t.float() for n, t in _read_weights(folder).items() if _is_ours(n)}
    wanted = tensor_shapes(config)
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != wanted.get(name, "no such tensor"):
            raise BadInput(
                f"{folder}: tensor {name} is {found}, its configuration has "
                f"{wanted.get(name, 'no such tensor')}"
            )
    return config, tensors


def read_published_config(folder: Path) -> DrafterConfig:
    """Without the tensors. Raises Missing, Corrupt, BadInput."""
    path = folder / CONFIG
    if not path.is_file():
        raise Missing(f"{folder}: no {CONFIG}: is it a drafter's folder?")
    try:
        read = orjson.loads(path.read_bytes())
        if not isinstance(read, dict):
            raise Corrupt(f"{path}: no JSON object")
        _check_known(read)
        return _config(read, read.get("dflash_config") or {})
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{path}: {error}") from error
    except KeyError as error:
        raise BadInput(f"{path}: no {error.args[0]!r}: is it a DFlash drafter's?") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{path}: {error}") from error
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def _check_known(read: Json) -> None:
    architectures = read.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise BadInput(f"architectures {architectures}: one of {', '.join(ARCHITECTURES)}")
    unknown = sorted(read.keys() - READ - IDLE)
    inside = read.get("dflash_config") or {}
    unknown += sorted(
        f"dflash_config.{key}"
        for key in inside.keys() - READ_INSIDE
        if key not in IDLE_INSIDE or (inside[key] or None) != (IDLE_INSIDE[key] or None)
    )
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: a drafter with such a thing can't be trained here")
    if read.get("hidden_act", "silu") != "silu":
        raise BadInput(f"hidden_act {read['hidden_act']!r}: silu is what this model has")
    if read.get("markov_head_type", "vanilla") != "vanilla" or read.get("enable_confidence_head"):
        raise BadInput("a DSpark head other than a vanilla one, or one with a confidence part")


def _config(read: Json, inside: Json) -> DrafterConfig:
    either: Json = read | inside
    num_layers, heads = read["num_hidden_layers"], read["num_attention_heads"]
    kinds = _layer_types(read, num_layers)
    num_target_layers = either["num_target_layers"]
    theta, scaling = _rope(read)
    return DrafterConfig(
        hidden_size=read["hidden_size"],
        intermediate_size=read["intermediate_size"],
        num_heads=heads,
        num_kv_heads=either.get("num_key_value_heads") or heads,
        head_dim=read.get("head_dim") or read["hidden_size"] // heads,
        num_layers=num_layers,
        vocab_size=read["vocab_size"],
        rms_norm_eps=read["rms_norm_eps"],
        attention_bias=read.get("attention_bias", False),
        max_position_embeddings=read["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        layer_types=kinds,
        sliding_window=read["sliding_window"] if SLIDING in kinds else None,
        num_target_layers=num_target_layers,
        target_layer_ids=either.get("target_layer_ids")
        or spread_layer_ids(num_target_layers, num_layers),
        mask_token_id=either["mask_token_id"],
        block_size=either.get("block_size", 16),  # as the servers have it
        markov_rank=read.get("markov_rank", 0),
    )


def _layer_types(read: Json, num_layers: int) -> list[str]:
    kinds = list(read.get("layer_types") or [FULL] * num_layers)
    for kind in set(kinds):
        if is_causal_in_block(read, kind) != (kind == SLIDING):
            raise BadInput(
                f"is_causal {read['is_causal']} with {kind}: here sliding layers are causal in "
                "the block and full ones are not"
            )
    return kinds


def _rope(read: Json) -> tuple[float, Json | None]:
    """Base and scaling, in either of transformers' forms."""
    scaling: dict[str, Any] = dict(read.get("rope_parameters") or read.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or read["rope_theta"]
    if "type" in scaling:  # before `rope_type`
        scaling.setdefault("rope_type", scaling.pop("type"))
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise BadInput(
            "partial_rotary_factor: its own code rotates whole heads all the same: remove the key "
            "if it was copied from the target"
        )
    is_plain = scaling.get("rope_type", "default") == "default"
    return float(theta), None if is_plain else scaling


def _read_weights(folder: Path) -> dict[str, Tensor]:
    paths = [folder / WEIGHTS]
    try:
        if not paths[0].is_file() and (folder / INDEX).is_file():
            listed = orjson.loads((folder / INDEX).read_bytes())["weight_map"].values()
            paths = [folder / Path(name).name for name in sorted(set(listed))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise Missing(f"{folder}: no {missing[0]}: only safetensors are read")
        return {name: tensor for path in paths for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, orjson.JSONDecodeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{folder}: weights can't be read: {error!r}") from error


def _bare(name: str) -> str:
    return name.removeprefix(PREFIX)


def _is_ours(name: str) -> bool:
    return not _bare(name).startswith(NOT_THE_DRAFTERS)
