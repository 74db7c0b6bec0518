"""How much arithmetic a microbatch asks of target and drafter: for a run's utilisation.

Read by train.py and benchmarks/online.py; the drafter's share is drafter/flops.py's. Of the target
the forward counts, of the layers that are kept: 2 operations for each parameter of a matrix product
and each token, and 4 per head dimension for each pair of tokens that see each other. Invariant:
padding counts for nothing, so that a fuller row looks busier only because it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.drafter.config import DrafterConfig
from trainer.drafter.flops import H200_PEAK, StepSize, step_flops
from trainer.drafter.mask import BlockLayout, num_seen_pairs
from trainer.online.batches import MicroBatch
from trainer.online.target import FrozenTarget

# Dense bf16 operations a second, by the vendor's datasheet; H100 and H200 are one chip.
PEAKS = {"H200": H200_PEAK, "H100": H200_PEAK}


@dataclass(frozen=True, slots=True)
class TargetSize:
    """What a target's forward costs."""

    num_parameters: int  # of matrix products that every token goes through
    num_layers: int  # with attention
    query_dim: int  # heads times their dimension


def target_size(target: FrozenTarget) -> TargetSize:
    """Of the layers that are left; of a mixture of experts, as if each token saw all of them."""
    text = target.model.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    matrices = [p.numel() for layer in target.layers for p in layer.parameters() if p.dim() > 1]
    return TargetSize(sum(matrices), len(target.layers), heads * head_dim)


def microbatch_flops(config: DrafterConfig, target: TargetSize | None, batch: MicroBatch) -> float:
    """Operations that `batch`, which must lie on the host, asks for; `target` of None: only those
    of the drafter.
    """
    anchors_BA = batch.anchors_BA
    positions_BA = batch.positions_BL.gather(1, anchors_BA.clamp_min(0))
    starts_BA = anchors_BA.clamp_min(0) - positions_BA
    num_blocks = int((anchors_BA >= 0).sum())
    num_empty = anchors_BA.numel() - num_blocks
    pairs = {
        kind: num_seen_pairs(
            BlockLayout(
                anchors_BA,
                starts_BA,
                batch.ids_BL.shape[1],
                config.block_size,
                config.window_of(kind),
            )
        )
        - num_empty * config.block_size  # a slot without an anchor sees itself
        for kind in dict.fromkeys(config.layer_types)
    }
    size = StepSize(
        num_context=batch.num_tokens,
        num_block_tokens=num_blocks * config.block_size,
        num_scored=num_blocks * config.num_drafts,
        num_seen_pairs=pairs,
    )
    return step_flops(config, size).total + (target_flops(target, batch) if target else 0.0)


def target_flops(target: TargetSize, batch: MicroBatch) -> float:
    """Of a forward; a token sees those before it in its document, and itself."""
    lengths = [placed.length for row in batch.samples for placed in row]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    products = 2.0 * target.num_parameters * batch.num_tokens
    return products + 4.0 * target.query_dim * target.num_layers * pairs


def peak_of(device: torch.device) -> float | None:
    """A chip's peak; None where nobody has looked it up."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in PEAKS.items() if chip in name), None)
