"""A drafter as the published DFlash checkpoints have it: what SGLang, vLLM and z-lab's code load.

Writes config.json, model.safetensors (bare names, no embedding, no head, no rotary buffers) and
provenance.json <- a checkpoint's weights; reads them back for evaluate.py. Invariant: what `lint`
lets pass has exactly the tensors that the format asks for, in shape and type, and the engine that
it is meant for runs what was trained (engines.py); the servers themselves skip unknown names and
don't report missing ones. Source: config.json and tensor names of z-lab's published checkpoints;
`auto_map` is left out, because it asks for a code file beside it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dflash_workers.contract.errors import BadInput, Conflict, Corrupt, Missing
from dflash_workers.contract.records import Json
from trainer.drafter.config import SLIDING, DrafterConfig
from trainer.drafter.engines import NEWEST, check_served, find_engine
from trainer.drafter.model import Drafter
from trainer.drafter.start import RANDOM_STD

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MARKOV = ("markov_w1", "markov_w2")
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def export_drafter(
    drafter: Drafter,
    out: Path,
    *,
    dtype: str = "bfloat16",
    provenance: Json,
    engine: str = NEWEST,
    check: Callable[[Path], Json] | None = None,
) -> Path:
    """Write and lint; `out` appears whole or not at all. Raises Conflict where it exists, BadInput
    where the engine would run something else.

    `check` is given the export before it appears: it refuses by raising, and what it returns is
    kept in the provenance, as "parity".
    """
    config = format_config(drafter.config, dtype)
    check_served(config, find_engine(engine))
    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    if out.exists():
        raise Conflict(f"{out} exists: choose another folder")
    draft = out.with_name(f"{out.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    tensors = {k: v.detach().cpu().to(DTYPES[dtype]) for k, v in drafter.state_dict().items()}
    save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
    (draft / CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    lint(draft, engine)
    provenance = provenance | {"engine": engine}
    if check:
        provenance = provenance | {"parity": check(draft)}
    (draft / PROVENANCE).write_bytes(orjson.dumps(provenance, option=orjson.OPT_INDENT_2))
    draft.rename(out)
    return out


def load_export(folder: Path) -> Drafter:
    """The drafter of an export, in fp32 on the CPU. Raises Missing, Corrupt."""
    drafter = Drafter(lint(folder))
    drafter.load_state_dict(load_file(folder / WEIGHTS))
    return drafter


def read_provenance(folder: Path) -> Json:
    """Where an export comes from; empty where it does not say. Raises Corrupt."""
    path = folder / PROVENANCE
    try:
        provenance: Json = orjson.loads(path.read_bytes()) if path.is_file() else {}
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{path}: {error}") from error
    return provenance


def lint(folder: Path, engine: str = "") -> DrafterConfig:
    """What an export says it is, once its tensors are just those and, where an engine is named,
    that one runs it. Raises Missing, Corrupt, BadInput.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise Missing(f"{folder}: no {name}: is it an export of a drafter?")
    config, dtype = _read_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise Corrupt(f"{folder / WEIGHTS}: {error}") from error
    wanted = {n: (shape, SAFETENSORS_DTYPES[dtype]) for n, shape in tensor_shapes(config).items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise Corrupt(
                f"{folder / WEIGHTS}: {name} is {found.get(name, 'missing')}, "
                f"the format has {wanted.get(name, 'no such tensor')}"
            )
    if engine:
        check_served(format_config(config, dtype), find_engine(engine))
    return config


def check_target(config: DrafterConfig, target: Any) -> None:
    """Raise BadInput where a drafter is another target's; `target`: its text configuration."""
    pairs = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "layers": (config.num_target_layers, target.num_hidden_layers),
    }
    apart = [
        f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if apart:
        raise BadInput(f"this drafter was made for another target: {'; '.join(apart)}")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The format's tensors, stated apart from the model, so that lint can disagree with it."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    attention["o_proj"] = (hidden, query)
    mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{n}.weight": shape for n, shape in attention.items()},
        **{f"mlp.{n}.weight": shape for n, shape in mlp.items()},
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.attention_bias:
        layer |= {f"self_attn.{n}.bias": (shape[0],) for n, shape in attention.items()}
    shapes = {f"layers.{i}.{n}": s for i in range(config.num_layers) for n, s in layer.items()}
    num_features = len(config.target_layer_ids) * hidden
    norms = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    tables = {f"markov_head.{n}.weight": (config.vocab_size, config.markov_rank) for n in MARKOV}
    head = tables if config.markov_rank else {}
    return {**shapes, **norms, **head, "fc.weight": (hidden, num_features)}


def format_config(config: DrafterConfig, dtype: str) -> Json:
    """config.json in the format's words."""
    return {
        "architectures": ["Qwen3DSparkModel" if config.markov_rank else "DFlashDraftModel"],
        **(_head_config(config) if config.markov_rank else {}),
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.target_layer_ids,
        },
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "initializer_range": RANDOM_STD,
        "use_cache": True,
        "dtype": dtype,
    }


def _head_config(config: DrafterConfig) -> Json:
    """What a DSpark drafter says of its head. Its block counts drafts, the anchor being input."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


def _read_config(path: Path) -> tuple[DrafterConfig, str]:
    try:
        read: dict[str, Any] = orjson.loads(path.read_bytes())
        config = DrafterConfig(
            hidden_size=read["hidden_size"],
            intermediate_size=read["intermediate_size"],
            num_heads=read["num_attention_heads"],
            num_kv_heads=read["num_key_value_heads"],
            head_dim=read["head_dim"],
            num_layers=read["num_hidden_layers"],
            vocab_size=read["vocab_size"],
            rms_norm_eps=read["rms_norm_eps"],
            attention_bias=read["attention_bias"],
            max_position_embeddings=read["max_position_embeddings"],
            rope_theta=read["rope_theta"],
            rope_scaling=read["rope_scaling"],
            layer_types=read["layer_types"],
            sliding_window=read["sliding_window"],
            num_target_layers=read["num_target_layers"],
            target_layer_ids=read["dflash_config"]["target_layer_ids"],
            mask_token_id=read["dflash_config"]["mask_token_id"],
            block_size=read["block_size"],
            markov_rank=read.get("markov_rank", 0),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, BadInput) as error:
        raise Corrupt(f"{path}: not a drafter's configuration: {error!r}") from error
    if format_config(config, read.get("dtype", "")) != read or read["dtype"] not in DTYPES:
        raise Corrupt(f"{path}: differs from what the format has for this drafter")
    return config, read["dtype"]
