"""A batch of blocks: packed token rows with their anchors, and what each block should say.

Made by online/step.py of a microbatch, read by objective.py and loss.py. A row holds documents one
after another; a token's position restarts at 0 with each, and that is all there is to know about
packing: a block belongs to the document of its anchor, starts where that one starts, and a label
counts only if its position goes on from the anchor's. Padding has position 0, so it goes on from
nothing. Invariant: nothing here depends on the number of documents, so no shape does either.

B batch, L context length, A anchors, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Rows of tokens and where the blocks start in them."""

    ids_BL: Tensor
    positions_BL: Tensor  # within the document; 0 at padding
    anchors_BA: Tensor  # places in the row, ascending; negative: no anchor in this slot

    @property
    def starts_BA(self) -> Tensor:
        """The first place of each anchor's document."""
        anchors_BA = self.anchors_BA.clamp_min(0)
        return anchors_BA - self.positions_BL.gather(1, anchors_BA)


@dataclass(frozen=True, slots=True, eq=False)
class BlockLabels:
    """What the scored places should say, and which of them exist."""

    ids_BAK: Tensor  # K places, the first one behind the anchor
    before_BAK: Tensor  # the token before each
    exist_BAK: Tensor  # bool; false in slots without an anchor and beyond a document's end


def padded_positions(lengths_B: Tensor, row_len: int) -> Tensor:
    """Positions, [B, L], of rows that hold one document and padding behind it."""
    positions_L = torch.arange(row_len, device=lengths_B.device)
    return torch.where(positions_L < lengths_B[:, None], positions_L, 0)


def block_labels(batch: BlockBatch, num_drafts: int) -> BlockLabels:
    """What all blocks should say: the tokens at anchor + 1 to anchor + `num_drafts`."""
    row_len = batch.ids_BL.shape[1]
    offsets_K = torch.arange(1, num_drafts + 1, device=batch.ids_BL.device)
    places_BAK = batch.anchors_BA[:, :, None] + offsets_K
    inside_BAK = (batch.anchors_BA >= 0)[:, :, None] & (places_BAK < row_len)
    places_BX = torch.where(inside_BAK, places_BAK, 0).flatten(1)
    positions_BAK = batch.positions_BL.gather(1, places_BX).view_as(places_BAK)
    expected_BAK = places_BAK - batch.starts_BA[:, :, None]
    ids_BAK = batch.ids_BL.gather(1, places_BX).view_as(places_BAK)
    anchor_ids_BA = batch.ids_BL.gather(1, batch.anchors_BA.clamp_min(0))
    return BlockLabels(
        ids_BAK,
        torch.cat((anchor_ids_BA[:, :, None], ids_BAK[:, :, :-1]), dim=2),
        inside_BAK & (positions_BAK == expected_BAK),
    )
