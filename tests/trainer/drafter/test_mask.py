"""The attention rule against a plain loop over the paper's sentence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trainer.drafter.mask import BlockLayout, dense_mask, sparse_mask

# Overlapping blocks, an anchor at the very start, one at the end, and slots without an anchor.
ANCHORS = [[0, 3, 4, 9], [2, 7, -1, -1]]


def sees(layout: BlockLayout, batch: int, query: int, key: int) -> bool:
    """ "A block token sees the context before its anchor, and its own block." Sliding layers: at
    most `window` positions back, itself included, and nothing after itself.
    """
    slot, offset = divmod(query, layout.block_size)
    anchor = int(layout.anchors_BA[batch, slot])
    if anchor < 0:
        return key - layout.context_len == query
    position = anchor + offset
    if key < layout.context_len:
        seen, key_position = key < anchor, key
    else:
        key_slot, key_offset = divmod(key - layout.context_len, layout.block_size)
        seen, key_position = key_slot == slot, anchor + key_offset
    if layout.window is not None:
        seen = seen and position - layout.window < key_position <= position
    return seen


@pytest.mark.parametrize("window", [None, 3, 5])
@pytest.mark.parametrize("block_size", [2, 3])
def test_the_mask_is_the_papers_sentence(window: int | None, block_size: int) -> None:
    layout = BlockLayout(torch.tensor(ANCHORS), 11, block_size, window)

    mask = dense_mask(layout)

    assert mask.shape == (2, 1, layout.num_queries, 11 + layout.num_queries)
    for batch, _, query, key in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)):
        assert mask[batch, 0, query, key] == sees(layout, int(batch), int(query), int(key))


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # uncompiled: slow, as warned
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_the_sparse_mask_is_attention_over_the_dense_one(window: int | None) -> None:
    torch.manual_seed(0)
    layout = BlockLayout(torch.tensor(ANCHORS), 11, 3, window)
    queries, keys, values = (
        torch.randn(2, 4, 12, 8),
        torch.randn(2, 2, 23, 8),
        torch.randn(2, 2, 23, 8),
    )

    sparse = flex_attention(queries, keys, values, block_mask=sparse_mask(layout), enable_gqa=True)

    dense = scaled_dot_product_attention(
        queries, keys, values, attn_mask=dense_mask(layout), enable_gqa=True
    )
    assert torch.allclose(sparse, dense, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_no_row_is_empty(window: int | None) -> None:
    mask = dense_mask(BlockLayout(torch.tensor(ANCHORS), 11, 3, window))

    assert mask.any(-1).all()
