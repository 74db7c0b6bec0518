"""Heads against drafting written out, one token after another."""

from __future__ import annotations

import numpy as np
import torch

from trainer.drafter.heads import MarkovHead, PlainHead

NUM_BLOCKS, BLOCK, HIDDEN, RANK, VOCAB = 3, 4, 8, 2, 20


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Final states of some blocks, their anchors' ids, and the target's head."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_BLOCKS, BLOCK, HIDDEN, generator=generator)
    return hidden, torch.tensor([3, 0, 19]), torch.randn(VOCAB, HIDDEN, generator=generator)


def markov_head() -> MarkovHead:
    head = MarkovHead(VOCAB, RANK)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.normal_(std=2.0, generator=generator)
    return head


def test_a_plain_head_drafts_by_each_state_behind_the_anchors_own() -> None:
    hidden, anchors, head = states()

    drafts = PlainHead().draft(hidden, anchors, head)

    logits = np.einsum("xkd,vd->xkv", hidden.numpy(), head.numpy())
    assert drafts.tolist() == logits[:, 1:].argmax(-1).tolist()


@torch.no_grad()
def test_a_markov_head_drafts_from_the_anchors_state_on_and_heeds_each_draft() -> None:
    hidden, anchors, head = states()
    markov = markov_head()

    drafts = markov.draft(hidden, anchors, head)

    before_table, after_table = (p.numpy() for p in markov.parameters())
    heeded = 0
    for block in range(NUM_BLOCKS):
        before = int(anchors[block])
        for place in range(BLOCK):
            plain = head.numpy() @ hidden[block, place].numpy()
            logits = plain + after_table @ before_table[before]
            heeded += int(logits.argmax()) != int(plain.argmax())
            before = int(logits.argmax())
            assert int(drafts[block, place]) == before
    assert heeded > 0


@torch.no_grad()
def test_what_training_adds_is_what_drafting_adds_where_the_token_before_is_the_draft() -> None:
    hidden, anchors, head = states()
    markov = markov_head()
    drafts = markov.draft(hidden, anchors, head)
    before = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)

    correction = markov.correction(before.flatten())

    assert correction is not None
    logits = hidden.flatten(0, 1) @ head.T + correction.rows_NR @ correction.table_VR.T
    assert logits.argmax(-1).tolist() == drafts.flatten().tolist()
