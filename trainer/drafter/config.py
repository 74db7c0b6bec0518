"""What a drafter is made of: its sizes, the target layers it listens to, its block and mask.

Made by fitting.py from the target's configuration and a few choices of the recipe (DrafterShape),
kept in every checkpoint, written out by export.py. Invariant: a DrafterConfig that exists is
consistent, and has nothing that the format's readers would read otherwise. It imports nothing
heavy: the model, its step and their benchmark need no tokenizer. Source: arXiv 2602.06036,
section 4, and the published checkpoints' config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    # Rotate only the part of a head that the target rotates. SGLang and z-lab's code read no such
    # thing from a drafter and rotate whole heads: for vLLM alone.
    partial_rotary: bool = False
    copy_target_layers: bool = False  # start from the target's last layers, not at random
    markov_rank: int = 0  # of a DSpark head: see heads.py; 0: a plain one

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise BadInput(f"num_layers must be at least 1, not {self.num_layers}")
        if self.block_size < 2:
            raise BadInput(f"block_size must be at least 2, not {self.block_size}")
        if self.markov_rank < 0:
            raise BadInput(f"markov_rank must be at least 0, not {self.markov_rank}")


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
    rope_scaling: Json | None  # the target's, where it has any: see rotary.py
    layer_types: list[str]
    sliding_window: int | None  # tokens; of the sliding layers
    num_target_layers: int
    target_layer_ids: list[int]  # ascending; feature i is the output of target layer i, 0-based
    mask_token_id: int
    block_size: int  # tokens that go through the drafter at once, the anchor included
    markov_rank: int = 0  # of a DSpark head; 0: a plain one

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
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown:
            raise BadInput(f"layer_types {sorted(unknown)}: the servers know {FULL} and {SLIDING}")
        if self.rope_scaling and self.rope_scaling["rope_type"] not in SERVED_ROPE_TYPES:
            raise BadInput(f"rope type {self.rope_scaling['rope_type']!r} is not supported")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise BadInput(f"{self.rotary_dim} of {self.head_dim} head dimensions can't be rotated")

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes: a plain head has nothing to say at the anchor's place."""
        return self.block_size if self.markov_rank else self.block_size - 1

    @property
    def rotary_dim(self) -> int:
        """Of each head: the dimensions that carry the position, the first ones."""
        share = (self.rope_scaling or {}).get("partial_rotary_factor", 1.0)
        return int(self.head_dim * share)

    def window_of(self, layer_type: str) -> int | None:
        """How many tokens such a layer looks back over, itself included; None: all."""
        return self.sliding_window if layer_type == SLIDING else None
