"""Labels against a loop over documents."""

from __future__ import annotations

import torch

from trainer.drafter.blocks import BlockBatch, block_labels, padded_positions

# Two documents of 5 and 4 tokens and padding; the second row is one document to its end.
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
DOCUMENTS = [[(0, 5), (5, 9)], [(0, 11)]]
ANCHORS = torch.tensor([[1, 3, 5, 7], [0, 8, 9, -1]])
IDS = torch.arange(100, 122).view(2, 11)


def test_a_label_is_the_anchors_documents_own_token_or_none() -> None:
    batch = BlockBatch(IDS, POSITIONS, ANCHORS)

    labels = block_labels(batch, num_drafts=3)

    for row, slot in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        anchor = int(ANCHORS[row, slot])
        ends = [end for start, end in DOCUMENTS[row] if start <= anchor < end]
        for k in (1, 2, 3):
            exists = anchor >= 0 and anchor + k < ends[0]
            assert bool(labels.exist_BAK[row, slot, k - 1]) == exists
            if exists:
                assert int(labels.ids_BAK[row, slot, k - 1]) == int(IDS[row, anchor + k])
                assert int(labels.before_BAK[row, slot, k - 1]) == int(IDS[row, anchor + k - 1])


def test_a_block_starts_where_its_anchors_document_does() -> None:
    batch = BlockBatch(IDS, POSITIONS, ANCHORS)

    assert batch.starts_BA.tolist() == [[0, 0, 5, 5], [0, 0, 0, 0]]


def test_padded_rows_count_up_to_their_length_and_no_further() -> None:
    positions = padded_positions(torch.tensor([3, 5, 0]), 5)

    assert positions.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
