"""Presets -> the engine's flags, in the words of the version that is installed.

Asked by -> machine before an engine is started; whether the engine took them is read back by
effective. Invariant: what the worker will use is what the engine is told, so that requests up to
its limit run at once and each such batch has its CUDA graph (past the captured sizes one H200 fell
from 56,000 tokens/s to 16,000). SGLang's names were read from its server_args.py in 0.5.9 to
0.5.23: two were renamed in 0.5.14.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.node.installed import version_key

SGLANG, VLLM = ENGINES = ("sglang", "vllm")
THROUGHPUT, MTP, HICACHE, DFLASH = PRESETS = ("throughput", "mtp", "hicache", "dflash")
DIALECT_OF = {SGLANG: "sglang", VLLM: "openai"}

# (since, names): the last entry that is not newer than the installed version counts.
_CUDA_GRAPH_SIZE = (((0,), "--cuda-graph-max-bs"), ((0, 5, 14), "--cuda-graph-max-bs-decode"))
_MAMBA_STRATEGY = (
    ((0,), "--mamba-scheduler-strategy"),
    ((0, 5, 14), "--mamba-radix-cache-strategy"),
)
_DRAFT_TOKENS = 4  # of three MTP steps: theirs, and the token that they start from
_VLLM_BLOCK = 15  # a DFlash block of 16 without its anchor


@dataclass(frozen=True, slots=True)
class Wish:
    """What one engine is to be."""

    engine: str  # sglang | vllm
    version: str
    presets: tuple[str, ...]
    max_in_flight: int  # of the worker
    model_config: Json  # the model's config.json
    drafter: Path | None = None
    is_cpu: bool = False
    engine_args: tuple[str, ...] = ()  # a person's own, as written: they win


def engine_flags(wish: Wish) -> list[str]:
    """Everything but where it listens, its model and its dtype. Raises BadInput."""
    for preset in wish.presets:
        if preset not in PRESETS:
            raise BadInput(f"no preset {preset!r}: use {', '.join(PRESETS)}")
    if (DFLASH in wish.presets) != (wish.drafter is not None):
        raise BadInput("the preset dflash and --drafter FOLDER want each other")
    if DFLASH in wish.presets and MTP in wish.presets:
        raise BadInput("an engine speculates in one way: mtp or dflash")
    of_presets = _sglang_flags(wish) if wish.engine == SGLANG else _vllm_flags(wish)
    return [*of_presets, *split_args(wish.engine_args)]


def split_args(texts: Sequence[str]) -> list[str]:
    """`--mem-fraction-static 0.85` as a shell would take it. Raises BadInput."""
    try:
        return [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise BadInput(f"--engine-arg {' '.join(texts)!r}: {error}") from error


def is_hybrid(model_config: Json) -> bool:
    """Whether some layers keep a recurrent state (Qwen3-Next, Qwen3.5 and later, Mamba kinds)."""
    text_config = model_config.get("text_config", model_config)
    kinds = text_config.get("layer_types") or text_config.get("layers_block_type") or ()
    return any("linear" in str(kind) or "mamba" in str(kind) for kind in kinds)


def _sglang_flags(wish: Wish) -> list[str]:
    version = version_key(wish.version)
    flags = ["--log-level-http", "warning"]  # a line per request would bury all others
    if not wish.is_cpu:
        flags += [_name_in(_CUDA_GRAPH_SIZE, version), str(wish.max_in_flight)]
    if HICACHE in wish.presets:
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
    if MTP in wish.presets:
        # NEXTN is another word for it, and the engine reports EAGLE either way.
        flags += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"]
        flags += ["--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(_DRAFT_TOKENS)]
    if DFLASH in wish.presets:
        flags += ["--speculative-algorithm", "DFLASH"]
        flags += ["--speculative-draft-model-path", str(wish.drafter)]
    if is_hybrid(wish.model_config) and {MTP, DFLASH} & set(wish.presets):
        # Speculation and the radix cache need it; the default of some versions forbids both.
        flags += [_name_in(_MAMBA_STRATEGY, version), "extra_buffer"]
    return flags


def _vllm_flags(wish: Wish) -> list[str]:
    if HICACHE in wish.presets:
        raise BadInput("the preset hicache is SGLang's: leave it out, or use --engine sglang")
    flags = ["--max-num-seqs", str(wish.max_in_flight), "--disable-uvicorn-access-log"]
    speculation: Json = {}
    if MTP in wish.presets:
        speculation = {"method": "mtp", "num_speculative_tokens": _DRAFT_TOKENS - 1}
    if DFLASH in wish.presets:
        speculation = {"method": "dflash", "model": str(wish.drafter)}
        speculation["num_speculative_tokens"] = _VLLM_BLOCK
    if speculation:
        flags += ["--speculative-config", orjson.dumps(speculation).decode()]
    return flags


def _name_in(names: Sequence[tuple[tuple[int, ...], str]], version: tuple[int, ...]) -> str:
    return [name for since, name in names if since <= version][-1]
