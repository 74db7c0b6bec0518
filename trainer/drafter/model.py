"""The drafter: a few decoder layers that read the target's hidden states and fill in a block.

Features of the target (from online/target.py) go through `fc` and `hidden_norm` once; every layer
makes keys and values of them with the same projections as of its block. Training and decoding are
the same modules: training gives all blocks of a batch at once (objective.py), decoding one block
and a cache of context keys and values (speculate.py). Embedding and head are the target's own,
frozen and never kept here, so the parameters' names are the published checkpoint's.
Source: arXiv 2602.06036, section 4.

B batch, L context length, A anchors, K block size, Q = A*K queries, D hidden, F features of the
target (layers * D), H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import DrafterConfig
from trainer.drafter.heads import make_head
from trainer.drafter.mask import BlockLayout, Mask, dense_mask
from trainer.drafter.rotary import Rotary, Rotation, rotate

KeysValues = tuple[Tensor, Tensor]  # each [B, kv heads, L, E]


class Drafter(nn.Module):
    """See the header. start.py or a checkpoint fills the parameters."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        num_features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = _norm(config, config.hidden_size)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = _norm(config, config.hidden_size)
        self.rotary = Rotary(config)
        self.markov_head = make_head(config.vocab_size, config.markov_rank)  # the format's name

    def forward(self, block_BQD: Tensor, context: list[KeysValues], anchors_BA: Tensor) -> Tensor:
        """Final states of the blocks' tokens, [B, Q, D], in rows of one document each; `context`
        from `read_context`.
        """
        starts_BA = torch.zeros_like(anchors_BA)
        masks = self.block_masks(
            anchors_BA, starts_BA, context_len=context[0][0].shape[2], make=dense_mask
        )
        return self.fill(block_BQD, context, self.block_rotation(anchors_BA, starts_BA), masks)

    def read_context(self, features_BLF: Tensor, first_position: int = 0) -> list[KeysValues]:
        """Keys and values of the target's features, per layer; the features' positions follow each
        other from `first_position` on.
        """
        positions_L = torch.arange(features_BLF.shape[1], device=features_BLF.device)
        return self.inject(features_BLF, self.rotary(positions_L[None] + first_position))

    def block_ids(self, ids_BL: Tensor, anchors_BA: Tensor) -> Tensor:
        """The blocks' input, [B, Q]: each anchor's token, then masks."""
        num_batch, num_anchors = anchors_BA.shape
        ids_BAK = ids_BL.new_full(
            (num_batch, num_anchors, self.config.block_size), self.config.mask_token_id
        )
        ids_BAK[:, :, 0] = ids_BL.gather(1, anchors_BA.clamp_min(0))
        return ids_BAK.flatten(1)

    def block_masks(
        self,
        anchors_BA: Tensor,
        starts_BA: Tensor,
        *,
        context_len: int,
        make: Callable[[BlockLayout], Mask],
    ) -> dict[str, Mask]:
        """The mask of each kind of layer; `make` is dense_mask or sparse_mask."""
        size = self.config.block_size
        return {
            kind: make(
                BlockLayout(anchors_BA, starts_BA, context_len, size, self.config.window_of(kind))
            )
            for kind in dict.fromkeys(self.config.layer_types)
        }

    def block_rotation(self, anchors_BA: Tensor, starts_BA: Tensor) -> Rotation:
        """Of the blocks' tokens: their positions go on from the anchor's in its document."""
        first_BA = (anchors_BA - starts_BA).clamp_min(0)
        offsets_K = torch.arange(self.config.block_size, device=anchors_BA.device)
        return self.rotary((first_BA[:, :, None] + offsets_K).flatten(1))

    def inject(self, features_BLF: Tensor, rotation: Rotation) -> list[KeysValues]:
        """`read_context` at any positions. Tensors in, tensors out: can be compiled."""
        if features_BLF.shape[-1] != self.fc.in_features:
            raise BadInput(f"features of {features_BLF.shape[-1]}, not {self.fc.in_features}")
        context_BLD = self.hidden_norm(self.fc(features_BLF))
        layers = cast(Iterable[DrafterLayer], self.layers)
        return [layer.self_attn.keys_values(context_BLD, rotation) for layer in layers]

    def fill(
        self,
        block_BQD: Tensor,
        context: list[KeysValues],
        rotation: Rotation,
        masks: dict[str, Mask],
    ) -> Tensor:
        """`forward` under masks of any form. Tensors in, tensors out: can be compiled."""
        for layer, kind, seen in zip(self.layers, self.config.layer_types, context, strict=True):
            block_BQD = layer(block_BQD, seen, rotation, masks[kind])
        return _tensor(self.norm(block_BQD))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP on the block's stream."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = InjectedAttention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = _norm(config, config.hidden_size)
        self.post_attention_layernorm = _norm(config, config.hidden_size)

    def forward(
        self, block_BQD: Tensor, context: KeysValues, rotation: Rotation, mask: Mask
    ) -> Tensor:
        normed_BQD = self.input_layernorm(block_BQD)
        block_BQD = block_BQD + self.self_attn(normed_BQD, context, rotation, mask)
        return _tensor(block_BQD + self.mlp(self.post_attention_layernorm(block_BQD)))


class InjectedAttention(nn.Module):
    """A block attends to the target's features and itself, through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_dim, key_dim = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_dim, bias=bias)
        self.o_proj = nn.Linear(query_dim, config.hidden_size, bias=bias)
        self.q_norm = _norm(config, config.head_dim)
        self.k_norm = _norm(config, config.head_dim)

    def forward(
        self, block_BQD: Tensor, context: KeysValues, rotation: Rotation, mask: Mask
    ) -> Tensor:
        queries_BHQE = rotate(self.q_norm(self._heads(self.q_proj(block_BQD))), rotation)
        block = self.keys_values(block_BQD, rotation)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
        mixed_BHQE = _attend(queries_BHQE, keys, values, mask)
        return _tensor(self.o_proj(mixed_BHQE.transpose(1, 2).flatten(2)))

    def keys_values(self, states_BLD: Tensor, rotation: Rotation) -> KeysValues:
        keys = rotate(self.k_norm(self._heads(self.k_proj(states_BLD))), rotation)
        values = self._heads(self.v_proj(states_BLD))
        return keys, values

    def _heads(self, states_BLX: Tensor) -> Tensor:
        return states_BLX.view(*states_BLX.shape[:-1], -1, self.head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states_BLD: Tensor) -> Tensor:
        gate = functional.silu(self.gate_proj(states_BLD))
        return _tensor(self.down_proj(gate * self.up_proj(states_BLD)))


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    if isinstance(mask, BlockMask):  # inside a compiled function only: else scores are Q by L + Q
        return _tensor(flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True))
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=True
    )


def _norm(config: DrafterConfig, size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=config.rms_norm_eps)


def _tensor(output: Any) -> Tensor:
    """torch's modules are typed to return anything."""
    return cast(Tensor, output)
