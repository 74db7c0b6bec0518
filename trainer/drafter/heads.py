"""From a block's final states to its drafts: the target's own head, alone or corrected.

Owned by model.py as the last thing that a drafter is made of; objective.py asks a head what it adds
to the logits in training, speculate.py has it draft. Two of them:

- PlainHead (DFlash): the state at offset k speaks for the token at anchor + k, so the anchor's own
  says nothing, and the drafts of a block know nothing of each other.
- MarkovHead (DSpark): the state at offset k speaks for the token at anchor + k + 1, and each draft
  adds a bias of low rank that depends on the token before it, so a block is drafted from left to
  right. Its confidence head is left out: the server reads none unless it verifies ragged.

Invariant: in training the token before is the true one, in drafting the one just drafted; the two
agree as far as the drafts hit, and what follows a miss is thrown away.
Source: arXiv 2602.06036 and 2607.05147; SGLang 0.5.17 loads both, the latter as `Qwen3DSparkModel`
with a "vanilla" head, whose tensors' names these are.

X blocks, K block size, N drafts of a block, D hidden, R rank, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What is added to the logits of some rows: `rows_NR @ table_VR.T`; both are trained."""

    rows_NR: Tensor
    table_VR: Tensor


class Head(nn.Module):
    """How states become drafts."""

    first_offset: int  # of the states that speak for a token, within a block

    def correction(self, before_N: Tensor) -> Correction | None:
        """For rows whose token before is known; None: nothing is added."""
        raise NotImplementedError

    def draft(self, hidden_XKD: Tensor, anchors_X: Tensor, head_VD: Tensor) -> Tensor:
        """The best ids, [X, N], behind the anchors' ids."""
        raise NotImplementedError


class PlainHead(Head):
    """Nothing but the target's head."""

    first_offset = 1

    def correction(self, before_N: Tensor) -> Correction | None:
        return None

    def draft(self, hidden_XKD: Tensor, anchors_X: Tensor, head_VD: Tensor) -> Tensor:
        return _logits(hidden_XKD[:, self.first_offset :], head_VD).argmax(-1)


class MarkovHead(Head):
    """A table from each token to what may follow it, in two thin matrices."""

    first_offset = 0

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def correction(self, before_N: Tensor) -> Correction | None:
        return Correction(self.markov_w1(before_N), self.markov_w2.weight)

    def draft(self, hidden_XKD: Tensor, anchors_X: Tensor, head_VD: Tensor) -> Tensor:
        logits_XKV = _logits(hidden_XKD, head_VD)
        drafts = [anchors_X]
        for logits_XV in logits_XKV.unbind(1):
            bias_XV = self.markov_w2(self.markov_w1(drafts[-1]))
            drafts.append((logits_XV + bias_XV).argmax(-1))
        return torch.stack(drafts[1:], dim=1)


def make_head(vocab_size: int, markov_rank: int) -> Head:
    """The head of that rank; 0: the plain one."""
    return MarkovHead(vocab_size, markov_rank) if markov_rank else PlainHead()


def _logits(hidden_XKD: Tensor, head_VD: Tensor) -> Tensor:
    # In this order a CPU needs half the time for so few rows.
    logits_VN = head_VD @ hidden_XKD.flatten(0, 1).to(head_VD.dtype).T
    return logits_VN.T.view(*hidden_XKD.shape[:2], -1)
