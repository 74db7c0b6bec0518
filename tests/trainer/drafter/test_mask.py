"""The attention rule against a plain loop over the paper's sentence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trainer.drafter.mask import TILE, BlockLayout, dense_mask, num_seen_pairs, sparse_mask

# Overlapping blocks, an anchor at the very start of a document, one at the end of the row, and
# slots without an anchor. Row 0 is one document; row 1 holds three, from places 0, 4 and 6.
ANCHORS = [[0, 3, 4, 9], [2, 4, 7, -1]]
STARTS = [[0, 0, 0, 0], [0, 4, 6, 0]]


def layout(block_size: int, window: int | None) -> BlockLayout:
    return BlockLayout(torch.tensor(ANCHORS), torch.tensor(STARTS), 11, block_size, window)


def sees(layout: BlockLayout, batch: int, query: int, key: int) -> bool:
    """ "A block token sees its document before its anchor, and its own block." Sliding layers: at
    most `window` positions back, itself included, and nothing after itself.
    """
    slot, offset = divmod(query, layout.block_size)
    anchor, start = int(layout.anchors_BA[batch, slot]), int(layout.starts_BA[batch, slot])
    if anchor < 0:
        return key - layout.context_len == query
    place = anchor + offset
    if key < layout.context_len:
        seen, key_place = start <= key < anchor, key
    else:
        key_slot, key_offset = divmod(key - layout.context_len, layout.block_size)
        seen, key_place = key_slot == slot, anchor + key_offset
    if layout.window is not None:
        seen = seen and place - layout.window < key_place <= place
    return seen


@pytest.mark.parametrize("window", [None, 3, 5])
@pytest.mark.parametrize("block_size", [2, 3])
def test_the_mask_is_the_papers_sentence(window: int | None, block_size: int) -> None:
    blocks = layout(block_size, window)

    mask = dense_mask(blocks)

    assert mask.shape == (2, 1, blocks.num_queries, 11 + blocks.num_queries)
    for batch, _, query, key in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)):
        assert mask[batch, 0, query, key] == sees(blocks, int(batch), int(query), int(key))
    assert num_seen_pairs(blocks) == int(mask.sum())


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # uncompiled: slow, as warned
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_the_sparse_mask_is_attention_over_the_dense_one(window: int | None) -> None:
    torch.manual_seed(0)
    blocks = layout(3, window)
    queries, keys, values = (
        torch.randn(2, 4, 12, 8),
        torch.randn(2, 2, 23, 8),
        torch.randn(2, 2, 23, 8),
    )

    sparse = flex_attention(queries, keys, values, block_mask=sparse_mask(blocks), enable_gqa=True)

    dense = scaled_dot_product_attention(
        queries, keys, values, attn_mask=dense_mask(blocks), enable_gqa=True
    )
    assert torch.allclose(sparse, dense, atol=1e-5)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("context_len", [3 * TILE, 3 * TILE + 50])
def test_a_tile_is_listed_as_full_partial_or_not_at_all_by_what_is_seen_in_it(
    window: int | None, context_len: int
) -> None:
    anchors = torch.cat((torch.arange(5, 165, 20), torch.arange(260, 372, 7)))[None]
    starts = torch.where(anchors < 100, 0, 100)
    blocks = BlockLayout(anchors, starts, context_len, 16, window)
    seen = dense_mask(blocks)[0, 0]

    mask = sparse_mask(blocks)

    num_rows, num_columns = -(-seen.shape[0] // TILE), -(-seen.shape[1] // TILE)
    kinds = set()
    for row, column in torch.cartesian_prod(torch.arange(num_rows), torch.arange(num_columns)):
        tile = seen[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        is_full = tile.numel() == TILE * TILE and bool(tile.all())
        kind = "full" if is_full else "partial" if tile.any() else "none"
        kinds.add(kind)
        lists = [
            (mask.kv_num_blocks, mask.kv_indices, row, column, "partial"),
            (mask.full_kv_num_blocks, mask.full_kv_indices, row, column, "full"),
            (mask.q_num_blocks, mask.q_indices, column, row, "partial"),
            (mask.full_q_num_blocks, mask.full_q_indices, column, row, "full"),
        ]
        for counts, indices, of, wanted, listed_kind in lists:
            assert counts is not None and indices is not None
            listed = indices[0, 0, of, : int(counts[0, 0, of])].tolist()
            assert (int(wanted) in listed) == (kind == listed_kind)
    assert kinds >= {"partial", "none"}
    assert "full" in kinds or window is not None


@pytest.mark.parametrize("window", [None, 150])
def test_the_kernels_get_the_very_tensors_that_torchs_own_builder_gives(window: int | None) -> None:
    anchors = torch.cat((torch.arange(5, 165, 20), torch.arange(260, 372, 7), torch.tensor([-1])))
    both = torch.stack((anchors, anchors.flip(0)))
    mask = sparse_mask(BlockLayout(both, torch.zeros_like(both), 3 * TILE, 16, window))

    wanted = BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=TILE,
        mask_mod=mask.mask_mod,
        seq_lengths=(25 * 16, 3 * TILE + 25 * 16),
    )

    assert mask.seq_lengths == wanted.seq_lengths
    assert mask.BLOCK_SIZE == wanted.BLOCK_SIZE
    sides = [f"{full}{side}_" for full in ("", "full_") for side in ("kv", "q")]
    for name in [side + part for side in sides for part in ("num_blocks", "indices")]:
        ours, theirs = getattr(mask, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype == torch.int32
        assert torch.equal(ours, theirs), name
        # The compiled kernels walk the lists without asking for their strides.
        assert ours.is_contiguous() and theirs.is_contiguous(), name


@pytest.mark.parametrize("window", [None, 3])
def test_no_row_is_empty(window: int | None) -> None:
    assert dense_mask(layout(3, window)).any(-1).all()
