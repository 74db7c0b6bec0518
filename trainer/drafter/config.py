"""What a drafter is made of: its sizes, the target layers it listens to, its block and mask.

Made from the target's configuration and a few choices of the recipe (DrafterShape), kept in every
checkpoint, written out by export.py. Invariant: a DrafterConfig that exists is consistent, and can
be served: whole-head rotary positions and per-head q/k norms as the format's readers have them,
whatever the target's own attention does. Source: arXiv 2602.06036, section 4, and the published
checkpoints' config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json

FULL, SLIDING = "full_attention", "sliding_attention"
SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # none of them depends on the length


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a recipe chooses; the rest of a drafter follows from its target."""

    num_layers: int
    block_size: int  # tokens of a block, the anchor included
    target_layer_ids: list[int] = field(default_factory=list)  # empty: spread over the target
    mask_token_id: int = -1  # -1: a row of the embedding that no text uses
    sliding_window: int = 0  # tokens; 0: every layer sees the whole context
    copy_target_layers: bool = False  # start from the target's last layers, not at random

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise BadInput(f"num_layers must be at least 1, not {self.num_layers}")
        if self.block_size < 2:
            raise BadInput(f"block_size must be at least 2, not {self.block_size}")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """All that decides a drafter's tensors and their meaning."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Json | None  # the target's, where it has any
    layer_types: list[str]
    sliding_window: int | None  # tokens; of the sliding layers
    num_target_layers: int
    target_layer_ids: list[int]  # ascending; feature i is the output of target layer i, 0-based
    mask_token_id: int
    block_size: int

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if not ids or sorted(set(ids)) != ids or ids[0] < 0:
            raise BadInput(f"target_layer_ids {ids}: name different layers in ascending order")
        # The output of the last layer is out of the servers' reach: they tap before a layer.
        if ids[-1] >= self.num_target_layers - 1:
            raise BadInput(
                f"target_layer_ids {ids}: the last one that a target of {self.num_target_layers} "
                f"layers can serve is {self.num_target_layers - 2}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise BadInput(f"mask_token_id {self.mask_token_id}: no such row in the embedding")
        if len(self.layer_types) != self.num_layers:
            raise BadInput(f"{len(self.layer_types)} layer_types for {self.num_layers} layers")
        if SLIDING in self.layer_types and (self.sliding_window or 0) < self.block_size:
            raise BadInput(f"sliding_window {self.sliding_window} is shorter than a block")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"{self.num_heads} heads can't share {self.num_kv_heads} kv heads")
        if self.rope_scaling and self.rope_scaling["rope_type"] not in SERVED_ROPE_TYPES:
            raise BadInput(f"rope type {self.rope_scaling['rope_type']!r} is not supported")


def drafter_config(target: PreTrainedConfig, shape: DrafterShape, model_dir: str) -> DrafterConfig:
    """The drafter of that shape for a target. `model_dir` is asked for its tokenizer only where
    the shape leaves the mask token open.
    """
    text = target.get_text_config()
    rope = dict(text.rope_parameters)
    # The format's readers rotate whole heads, so a target's partial rotation is not inherited.
    rope.pop("partial_rotary_factor", None)
    num_target_layers = int(text.num_hidden_layers)
    layer_type = SLIDING if shape.sliding_window else FULL
    return DrafterConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_layers=shape.num_layers,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        attention_bias=bool(getattr(text, "attention_bias", False)),
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=float(rope.pop("rope_theta")),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        # As published: the last layer sees everything, those below a window.
        layer_types=[layer_type] * (shape.num_layers - 1) + [FULL],
        sliding_window=shape.sliding_window or None,
        num_target_layers=num_target_layers,
        target_layer_ids=shape.target_layer_ids
        or spread_layer_ids(num_target_layers, shape.num_layers),
        mask_token_id=shape.mask_token_id
        if shape.mask_token_id >= 0
        else unused_token_id(model_dir, text.vocab_size),
        block_size=shape.block_size,
    )


def spread_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """As many target layers as the drafter has, from the second to the last but two."""
    if num_draft_layers == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def unused_token_id(model_dir: str, vocab_size: int) -> int:
    """A row of the target's embedding that no conversation uses: the first one beyond the
    tokenizer, else the unknown token, else the last special token without a duty.

    Raises BadInput where there is none.
    """
    tokenizer = load_tokenizer(model_dir)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    duties = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in duties:
        return int(tokenizer.unk_token_id)
    idle = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    idle = [i for i in idle if i not in duties]
    if not idle:
        raise BadInput(f"{model_dir}: no token is free to be the mask: name one (mask_token_id)")
    return int(max(idle))
