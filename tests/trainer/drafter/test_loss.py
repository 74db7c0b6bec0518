"""The loss against the sums written out, its gradient against autograd over whole logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.blocks import BlockBatch, BlockLabels, block_labels
from trainer.drafter.heads import Correction
from trainer.drafter.loss import LossRecipe, LossSums, block_loss

# Rows of 5 and 3 tokens; blocks of 3, so two scored places each.
IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [1, 2, 3, 0, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, 0]])
LENGTHS = [5, 3]
ANCHORS = torch.tensor([[1, 3], [0, -1]])
GAMMA = 2.0

RECIPES = [
    LossRecipe(GAMMA),
    LossRecipe(GAMMA, weights="dpace", dpace_alpha=0.3),
    LossRecipe(GAMMA, distillation=1.0, cross_entropy=0.0),
    LossRecipe(GAMMA, total_variation=1.0, cross_entropy=0.0),
    LossRecipe(GAMMA, cross_entropy=0.5, distillation=0.7, total_variation=0.3, weights="dpace"),
]


def labels() -> BlockLabels:
    return block_labels(BlockBatch(IDS, POSITIONS, ANCHORS), num_drafts=2)


def tensors(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafter's and teacher's states at the scored places, and a head."""
    torch.manual_seed(seed)
    hidden = torch.randn(2, 2, 2, 16, requires_grad=True)
    head = torch.randn(10, 16)
    head[7] = hidden[0, 0, 0].detach()  # one draft that hits: anchor 1, place 1 -> id 7
    return hidden, torch.randn(2, 2, 2, 16), head


def scored(batch: int, slot: int) -> list[tuple[int, int]]:
    """Place from 0 and label, of each that has one."""
    anchor = int(ANCHORS[batch, slot])
    ends = [k for k in (1, 2) if anchor >= 0 and anchor + k < LENGTHS[batch]]
    return [(k - 1, int(IDS[batch, anchor + k])) for k in ends]


def written_out(
    hidden: Tensor, teacher: Tensor, head: Tensor, recipe: LossRecipe
) -> tuple[Tensor, float]:
    """Numerator and weight, one row at a time, in fp64; the numerator can be differentiated."""
    numerator, weight = torch.zeros((), dtype=torch.float64), 0.0
    for batch, slot in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        rows = scored(batch, slot)
        probs = [(hidden[batch, slot, k].double() @ head.double().T).softmax(0) for k, _ in rows]
        confidence = [
            (1 - recipe.dpace_alpha) * float(p[label].detach()) + recipe.dpace_alpha
            for p, (_, label) in zip(probs, rows, strict=True)
        ]
        for (k, label), q in zip(rows, probs, strict=True):
            if recipe.weights == "dpace":
                w = sum(math.prod(confidence[: j + 1]) for j in range(k, len(rows)))
            else:
                w = math.exp(-k / GAMMA)
            p = (teacher[batch, slot, k].double() @ head.double().T).softmax(0)
            loss = -recipe.cross_entropy * q[label].log()
            loss = loss + recipe.distillation * (p * (p.log() - q.log())).sum()
            loss = loss + recipe.total_variation * (1 - torch.minimum(p, q).sum())
            numerator = numerator + w * loss
            weight += w
    return numerator, weight


def loss_of(hidden: Tensor, teacher: Tensor, head: Tensor, recipe: LossRecipe) -> LossSums:
    teacher_or_none = teacher if recipe.needs_teacher else None
    return block_loss(hidden, labels(), head, recipe, teacher_BAKD=teacher_or_none)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_sums_and_gradient_are_those_of_whole_logits_however_chunked(
    recipe: LossRecipe, chunk_rows: int
) -> None:
    hidden, teacher, head = tensors(0)
    recipe = dataclasses.replace(recipe, chunk_rows=chunk_rows)
    wanted, weight = written_out(hidden, teacher, head, recipe)
    (wanted_gradient,) = torch.autograd.grad(wanted * 3, hidden)

    sums = loss_of(hidden, teacher, head, recipe)
    (gradient,) = torch.autograd.grad(sums.numerator * 3, hidden)

    assert float(sums.numerator.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-5)
    assert torch.allclose(gradient, wanted_gradient.float(), atol=2e-5)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_a_correction_moves_the_logits_and_is_trained_with_them(chunk_rows: int) -> None:
    hidden, teacher, head = tensors(0)
    more = torch.randn(2, 2, 2, 5, requires_grad=True)
    table = torch.randn(10, 5, requires_grad=True)
    recipe = dataclasses.replace(RECIPES[0], chunk_rows=chunk_rows)
    # One product over joined operands is the sum of two.
    joined, joined_head = torch.cat((hidden, more), dim=-1), torch.cat((head, table), dim=-1)
    unused = torch.cat((teacher, torch.zeros(2, 2, 2, 5)), dim=-1)
    wanted, _ = written_out(joined, unused, joined_head, recipe)
    wanted_gradients = torch.autograd.grad(wanted * 3, [hidden, more, table])

    correction = Correction(more.flatten(0, 2), table)
    sums = block_loss(hidden, labels(), head, recipe, correction=correction)
    gradients = torch.autograd.grad(sums.numerator * 3, [hidden, more, table])

    assert float(sums.numerator.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert torch.allclose(gradient, wanted_gradient.float(), atol=1e-4)


def test_hits_acceptance_and_entropy_are_counted_over_labels_alone() -> None:
    hidden, teacher, head = tensors(0)
    sums = loss_of(hidden, teacher, head, RECIPES[0])

    correct, existing, accepted, entropy, blocks = [0, 0], [0, 0], 0, 0.0, 0
    for batch, slot in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        rows, still = scored(batch, slot), True
        blocks += bool(rows)
        for k, label in rows:
            probs = (hidden[batch, slot, k] @ head.T).detach().double().softmax(0)
            hit = int(probs.argmax()) == label
            still = still and hit
            correct[k] += hit
            existing[k] += 1
            accepted += still
            entropy -= float((probs * probs.log()).sum())
    assert sums.correct_K.tolist() == correct
    assert correct[0] >= 1
    assert sums.scored_K.tolist() == existing
    assert int(sums.num_accepted) == accepted
    assert int(sums.num_blocks) == blocks == 3
    assert float(sums.entropy) == pytest.approx(entropy, rel=1e-4)


def test_a_hit_behind_a_miss_is_not_accepted() -> None:
    head = torch.eye(10, 16)
    hidden = torch.zeros(1, 1, 3, 16)
    hidden[0, 0, [0, 1, 2], [3, 9, 5]] = 1.0  # drafts 3, 9, 5 where 3, 4, 5 are right
    ids, before = torch.tensor([[[3, 4, 5]]]), torch.tensor([[[2, 3, 4]]])
    right = BlockLabels(ids, before, torch.ones(1, 1, 3, dtype=torch.bool))

    sums = block_loss(hidden, right, head, LossRecipe(GAMMA))

    assert sums.correct_K.tolist() == [1, 0, 1]
    assert int(sums.num_accepted) == 1


def test_what_has_no_label_pulls_at_nothing() -> None:
    hidden, _, head = tensors(1)

    (gradient,) = torch.autograd.grad(
        block_loss(hidden, labels(), head, RECIPES[0]).numerator, hidden
    )

    exists = labels().exist_BAK
    assert (gradient[~exists] == 0).all()
    assert (gradient[exists].abs().sum(-1) > 0).all()


def test_a_term_with_the_targets_distribution_needs_the_targets_states() -> None:
    hidden, teacher, head = tensors(0)

    with pytest.raises(BadInput, match="final states"):
        block_loss(hidden, labels(), head, RECIPES[2])
    with pytest.raises(BadInput, match="final states"):
        block_loss(hidden, labels(), head, RECIPES[0], teacher_BAKD=teacher)


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.0},
        {"gamma": 1.0, "weights": "linear"},
        {"gamma": 1.0, "dpace_alpha": 1.5},
        {"gamma": 1.0, "cross_entropy": 0.0},
        {"gamma": 1.0, "distillation": -1.0},
    ],
)
def test_a_recipe_that_means_nothing_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        LossRecipe(**change)
