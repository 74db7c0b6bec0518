"""Who sees whom: the attention rule of DFlash, stated once, for training and for decoding.

Queries are the A*K tokens of all blocks; keys are [L context features | the same A*K tokens]. A
block token sees the context strictly before its anchor (the anchor's own feature does not exist yet
when the block is drafted) and its own block: all of it in full layers; itself and what precedes it
in sliding layers, which also look back over a window only, as the servers have it. Slots without an
anchor see only themselves, so that no row is empty. Used by model.py, in both its forms.
Source: arXiv 2602.06036, section 4; the causality of sliding layers is the servers' default.

B batch, L context length, A anchors, K block size, Q = A*K queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mask = Tensor | BlockMask  # a Tensor is bool, [B, 1, Q, L + Q], true where a query sees a key


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Where the blocks of a batch lie, for one kind of layer."""

    anchors_BA: Tensor  # negative: no anchor in this slot
    context_len: int
    block_size: int
    window: int | None  # tokens; None: a full layer

    @property
    def num_queries(self) -> int:
        return self.anchors_BA.shape[1] * self.block_size


def block_rule(layout: BlockLayout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule: (batch, head, query, key) -> seen; indices of any shapes that broadcast."""
    # Plain locals: flex attention compiles the closure, and tensors and ints are what it can lift.
    anchors_BA, context_len = layout.anchors_BA, layout.context_len
    block_size, window = layout.block_size, layout.window

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = anchors_BA[batch, query // block_size]
        block_key = key - context_len
        context = (block_key < 0) & (key < anchor)
        block = (block_key >= 0) & (block_key // block_size == query // block_size)
        if window is not None:
            context = context & (key > anchor + query % block_size - window)
            block = block & (block_key <= query)
        return torch.where(anchor >= 0, context | block, block_key == query)

    return sees


def dense_mask(layout: BlockLayout) -> Tensor:
    """The rule as a bool tensor, [B, 1, Q, L + Q]."""
    device = layout.anchors_BA.device
    batch = torch.arange(len(layout.anchors_BA), device=device)[:, None, None, None]
    query = torch.arange(layout.num_queries, device=device)[:, None]
    key = torch.arange(layout.context_len + layout.num_queries, device=device)
    return block_rule(layout)(batch, torch.zeros_like(batch), query, key)


def sparse_mask(layout: BlockLayout) -> BlockMask:
    """The rule for compiled flex attention, which leaves out what nobody sees."""
    num_queries = layout.num_queries
    return create_block_mask(
        block_rule(layout),
        B=len(layout.anchors_BA),
        H=None,
        Q_LEN=num_queries,
        KV_LEN=layout.context_len + num_queries,
        device=str(layout.anchors_BA.device),
    )
