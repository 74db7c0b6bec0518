"""Who sees whom: the attention rule of DFlash, stated once, for training and for decoding.

Queries are the A*K tokens of all blocks; keys are [L context features | the same A*K tokens]. A
block token sees the context of its own document strictly before its anchor (the anchor's own
feature does not exist yet when the block is drafted) and its own block: all of it in full layers;
itself and what precedes it in sliding layers, which also look back over a window only, as the
servers have it. So each query sees two ranges of keys, and both forms of the mask are read off
those. Slots without an anchor see only themselves, so that no row is empty. Used by model.py.
Source: arXiv 2602.06036, section 4; the causality of sliding layers is the servers' default.

B batch, L context length, A anchors, K block size, Q = A*K queries, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

Mask = Tensor | BlockMask  # a Tensor is bool, [B, 1, Q, L + Q], true where a query sees a key

TILE = 128  # queries by keys that flex attention takes or leaves as one


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Where the blocks of a batch lie, for one kind of layer."""

    anchors_BA: Tensor  # negative: no anchor in this slot
    starts_BA: Tensor  # first place of the anchor's document
    context_len: int
    block_size: int
    window: int | None  # tokens; None: a full layer

    @property
    def num_queries(self) -> int:
        return self.anchors_BA.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        return self.context_len + self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """The keys that each query sees: two half-open ranges, each [B, Q, 1]."""

    context_from: Tensor
    context_to: Tensor
    block_from: Tensor
    block_to: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.context_from, self.context_to, self.block_from, self.block_to

    def num_seen(self, first_key: Tensor, end_key: Tensor) -> Tensor:
        """How many keys of [first_key, end_key) a query sees."""
        context = end_key.minimum(self.context_to) - first_key.maximum(self.context_from)
        block = end_key.minimum(self.block_to) - first_key.maximum(self.block_from)
        return context.clamp_min(0) + block.clamp_min(0)


def key_ranges(layout: BlockLayout) -> KeyRanges:
    """The rule."""
    block_size, window = layout.block_size, layout.window
    query_Q = torch.arange(layout.num_queries, dtype=torch.int32, device=layout.anchors_BA.device)
    anchor_BQ = layout.anchors_BA.int().repeat_interleave(block_size, dim=1)
    key_of_itself_BQ = (layout.context_len + query_Q).expand_as(anchor_BQ)
    context_from = layout.starts_BA.int().repeat_interleave(block_size, dim=1)
    block_from = key_of_itself_BQ - query_Q % block_size
    block_to = block_from + block_size
    if window is not None:
        context_from = context_from.maximum(anchor_BQ + query_Q % block_size - window + 1)
        block_to = key_of_itself_BQ + 1
    is_empty_BQ = anchor_BQ < 0
    block_from = torch.where(is_empty_BQ, key_of_itself_BQ, block_from)
    block_to = torch.where(is_empty_BQ, key_of_itself_BQ + 1, block_to)
    ranges = (context_from, anchor_BQ.clamp_min(0), block_from, block_to)
    return KeyRanges(*(r[..., None] for r in ranges))


def dense_mask(layout: BlockLayout) -> Tensor:
    """The rule as a bool tensor, [B, 1, Q, L + Q]."""
    ranges = key_ranges(layout)
    key = torch.arange(layout.num_keys, device=layout.anchors_BA.device)
    return ranges.num_seen(key, key + 1)[:, None] > 0


def sparse_mask(layout: BlockLayout) -> BlockMask:
    """The rule for compiled flex attention, which leaves out what nobody sees.

    Built from the ranges tile by tile: the queries by keys of it never exist.
    """
    ranges = key_ranges(layout)
    context_from, context_to, block_from, block_to = (r[..., 0] for r in ranges.tensors())

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key >= context_from[batch, query]) & (key < context_to[batch, query])
        block = (key >= block_from[batch, query]) & (key < block_to[batch, query])
        return context | block

    num_seen_BTT = _num_seen_by_tile(ranges, layout)
    is_full_BTT = num_seen_BTT == TILE * TILE
    is_partial_BTT = (num_seen_BTT > 0) & ~is_full_BTT
    partial, full, partial_by_key, full_by_key = (
        _tile_lists(listed)
        for listed in (is_partial_BTT, is_full_BTT, is_partial_BTT.mT, is_full_BTT.mT)
    )
    # The constructor, not `from_kv_blocks`: that turns the lists round in a hundred small kernels.
    return BlockMask(
        (layout.num_queries, layout.num_keys),
        *partial,
        *full,
        *partial_by_key,
        *full_by_key,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=sees,
    )


def num_seen_pairs(layout: BlockLayout) -> int:
    """Queries times the keys that they see: the work of attention, see flops.py."""
    first = torch.zeros((), dtype=torch.int32, device=layout.anchors_BA.device)
    return int(key_ranges(layout).num_seen(first, first + layout.num_keys).sum())


def _num_seen_by_tile(ranges: KeyRanges, layout: BlockLayout) -> Tensor:
    """[B, T, T]; what lies beyond the last query or key counts as unseen."""
    num_key_tiles = -(-layout.num_keys // TILE)
    first_T = TILE * torch.arange(num_key_tiles, dtype=torch.int32, device=layout.anchors_BA.device)
    num_seen_BQT = ranges.num_seen(first_T, first_T + TILE)
    padded = pad(num_seen_BQT, (0, 0, 0, -layout.num_queries % TILE))
    return padded.view(len(padded), -1, TILE, num_key_tiles).sum(2)


def _tile_lists(is_listed_BTT: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of tiles how many are listed, and which, the listed ones first."""
    # Contiguous: sorting keeps a transposed layout, and flex attention's kernels don't look.
    is_listed_BTT = is_listed_BTT.contiguous()
    order = is_listed_BTT.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_listed_BTT.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
