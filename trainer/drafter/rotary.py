"""Rotary positions: the angles of absolute positions, and the turn that they give to a head.

Used by model.py for queries, block keys and context keys alike. Scaling (llama3, yarn, linear) is
transformers' own, so that a drafter turns its heads as its target does. Invariant: angles are
computed and applied in fp32 from fp32 frequencies, whatever type the weights have; frequencies
rounded to bf16 would put far positions in wrong places. Partial rotation turns the first dimensions
of a head and leaves the rest. Source: transformers' modeling_rope_utils.

B batch, L length, H heads, E head size, R rotary half.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.drafter.config import DrafterConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32, each [B, L, R]


class Rotary:
    """A drafter's frequencies. No module: a cast of the drafter must not reach them."""

    def __init__(self, config: DrafterConfig) -> None:
        scaling = dict(config.rope_scaling or {"rope_type": "default"})
        scaling.pop("partial_rotary_factor", None)  # rotary_dim says it already
        embedding = Qwen3RotaryEmbedding(
            Qwen3Config(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.rotary_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters={**scaling, "rope_theta": config.rope_theta},
            )
        )
        self._gain = float(embedding.attention_scaling)
        # By device: a copy in each call would make the GPU wait.
        self._frequencies = {torch.device("cpu"): embedding.inv_freq.float()}

    def __call__(self, positions_BL: Tensor) -> Rotation:
        device = positions_BL.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles_BLR = positions_BL[..., None].float() * self._frequencies[device]
        return angles_BLR.cos() * self._gain, angles_BLR.sin() * self._gain


def rotate(heads_BHLE: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + R) of each head; the type stays."""
    cosines, sines = (r[:, None] for r in rotation)
    half = cosines.shape[-1]
    wide = heads_BHLE.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, dim=-1).to(heads_BHLE.dtype)
