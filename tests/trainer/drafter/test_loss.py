"""The loss against cross-entropy written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.loss import LossRecipe, block_labels, block_loss, place_weights

IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [1, 2, 3, 0, 0, 0]])
LENGTHS = torch.tensor([5, 3])
ANCHORS = torch.tensor([[1, 3], [0, -1]])
GAMMA = 2.0


def expected_sums(hidden: Tensor, head: Tensor) -> tuple[float, float, list[int], list[int]]:
    """The paper's sum, one label at a time."""
    numerator, weight = 0.0, 0.0
    correct, scored = [0, 0], [0, 0]
    for b in range(2):
        for a in range(2):
            anchor = int(ANCHORS[b, a])
            for k in (1, 2):
                if anchor < 0 or anchor + k >= int(LENGTHS[b]):
                    continue
                logits = head.double() @ hidden[b, a, k].double()
                label = int(IDS[b, anchor + k])
                w = math.exp(-(k - 1) / GAMMA)
                numerator += w * float(logits.logsumexp(0) - logits[label])
                weight += w
                scored[k - 1] += 1
                correct[k - 1] += int(logits.argmax()) == label
    return numerator, weight, correct, scored


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_the_loss_is_the_papers_sum_however_it_is_chunked(chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 2, 3, 16, requires_grad=True)
    head = torch.randn(10, 16)
    head[7] = hidden[0, 0, 1].detach() * 9  # one draft that hits: anchor 1, place 1 -> id 7
    labels = block_labels(IDS, LENGTHS, ANCHORS, weights_K=place_weights(3, GAMMA, IDS.device))

    sums = block_loss(hidden, labels, head, chunk_rows=chunk_rows)

    numerator, weight, correct, scored = expected_sums(hidden.detach(), head)
    assert float(sums.numerator.detach()) == pytest.approx(numerator, rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-6)
    assert sums.correct_K.tolist() == correct
    assert correct[0] >= 1
    assert sums.scored_K.tolist() == scored


def test_the_gradient_is_that_of_the_whole_logits() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 2, 3, 16, requires_grad=True)
    head = torch.randn(10, 16)
    labels = block_labels(IDS, LENGTHS, ANCHORS, weights_K=place_weights(3, GAMMA, IDS.device))
    entropy = torch.nn.functional.cross_entropy(
        (hidden[:, :, 1:] @ head.T).flatten(0, 2), labels.ids_BAK.flatten(), reduction="none"
    )
    (wanted,) = torch.autograd.grad((entropy * labels.weights_BAK.flatten()).sum() * 3, hidden)

    (got,) = torch.autograd.grad(
        block_loss(hidden, labels, head, chunk_rows=3).numerator * 3, hidden
    )

    assert torch.allclose(got, wanted, atol=1e-5)
    assert got[:, :, 0].abs().sum() == 0  # the anchor's own place is not scored


def test_a_gamma_of_zero_is_refused() -> None:
    with pytest.raises(BadInput):
        LossRecipe(gamma=0.0)
