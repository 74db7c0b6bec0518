"""What each engine makes of a drafter's config.json, where engines differ.

Asked by export.py before an export appears. A drafter means what it was trained as; an engine that
computes something else drafts badly and says nothing, because the target hides it. So a drafter is
exported for an engine by name and version, and refused where that one would read it otherwise.
Invariant: an engine that isn't listed is refused, and what isn't known of a listed one counts as
not served.
Sources: sglang 0.5.17 and 0.5.23, srt/models/dflash.py (`_get_dflash_layer_attention_params`, the
rotary embedding of `DFlashAttention`) and srt/models/dspark.py; vllm 0.33.0,
model_executor/models/qwen3_dflash.py; dflash 0.1.0, model.py (`Qwen3DFlashAttention`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from trainer.drafter.config import SLIDING


@dataclass(frozen=True, slots=True)
class Engine:
    """One version of a server, or of z-lab's package."""

    name: str
    heeds_is_causal: bool  # of sliding layers: else they are causal in the block whatever it says
    rotates_partially: bool  # else whole heads, whatever the target rotates
    loads_markov_head: bool


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang==0.5.17", heeds_is_causal=False, rotates_partially=False, loads_markov_head=True
        ),
        Engine(
            "sglang==0.5.23", heeds_is_causal=True, rotates_partially=False, loads_markov_head=True
        ),
        Engine(
            "vllm==0.33.0", heeds_is_causal=True, rotates_partially=True, loads_markov_head=False
        ),
        Engine(
            "dflash==0.1.0", heeds_is_causal=True, rotates_partially=False, loads_markov_head=False
        ),
    )
}
NEWEST = "sglang==0.5.23"


def find_engine(name: str) -> Engine:
    """Raises BadInput where it isn't known."""
    if name not in ENGINES:
        raise BadInput(f"engine {name!r} isn't known: there are {', '.join(ENGINES)}")
    return ENGINES[name]


def check_served(config: Json, engine: Engine) -> None:
    """Raise BadInput, with every reason, where it would not run what `config` says."""
    reasons = []
    if not engine.heeds_is_causal and _has_open_windows(config):
        reasons.append(
            "its sliding layers look ahead within a block (is_causal is false), and there they "
            "are causal"
        )
    if not engine.rotates_partially and _partial_rotary_factor(config) != 1.0:
        reasons.append("it rotates a part of each head, and there whole heads are rotated")
    if not engine.loads_markov_head and config.get("markov_rank"):
        reasons.append("it has a DSpark head, which is not loaded there")
    if reasons:
        raise BadInput(
            f"this drafter is not what {engine.name} would run: {'; '.join(reasons)}; "
            "name another engine with --for"
        )


def is_causal_in_block(config: Json, layer_type: str) -> bool:
    """As drafters are trained: `is_causal` where it is given, else sliding layers alone."""
    stated = config.get("is_causal")
    return layer_type == SLIDING if stated is None else bool(stated)


def _has_open_windows(config: Json) -> bool:
    kinds = config.get("layer_types") or []
    return SLIDING in kinds and not is_causal_in_block(config, SLIDING)


def _partial_rotary_factor(config: Json) -> float:
    scaling: Json = config.get("rope_scaling") or {}
    return float(scaling.get("partial_rotary_factor", 1.0))
