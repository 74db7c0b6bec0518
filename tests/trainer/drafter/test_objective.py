"""A batch through the drafter: packed rows, empty slots, the teacher's places."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from trainer.drafter.blocks import BlockBatch, padded_positions
from trainer.drafter.loss import LossRecipe, LossSums
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds

# Documents of one packed row, each with its anchors: some near its start, some near its end, so
# that labels run out where the next one begins.
DOCUMENTS = [(9, [0, 3, 8]), (5, [1, 2, 4]), (12, [5, 6, 10])]
NUM_PADDING, NUM_FREE_SLOTS = 3, 2


def objective_of(drafter: Drafter, recipe: LossRecipe | None = None) -> Objective:
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(512, 32, generator=generator) for _ in range(2))
    ends = TargetEnds(lambda ids: torch.nn.functional.embedding(ids, embedding), head)
    return Objective(drafter, ends, recipe or LossRecipe(2.0))


def one_by_one() -> list[tuple[BlockBatch, Tensor]]:
    """Each document as a row of its own, with its features."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            BlockBatch(
                torch.randint(500, (1, length), generator=generator),
                torch.arange(length)[None],
                torch.tensor([anchors]),
            ),
            torch.randn(1, length, 64, generator=generator),
        )
        for length, anchors in DOCUMENTS
    ]


def packed() -> tuple[BlockBatch, Tensor]:
    """All of them in one row, padding and free slots behind; features of padding are wild."""
    rows, anchors, start = one_by_one(), [], 0
    for batch, _ in rows:
        anchors.append(batch.anchors_BA + start)
        start += batch.ids_BL.shape[1]
    padding = torch.zeros(1, NUM_PADDING, dtype=torch.long)
    batch = BlockBatch(
        torch.cat([*(b.ids_BL for b, _ in rows), padding], dim=1),
        torch.cat([*(b.positions_BL for b, _ in rows), padding], dim=1),
        torch.cat([*anchors, torch.full((1, NUM_FREE_SLOTS), -1)], dim=1),
    )
    features = torch.cat([*(f for _, f in rows), torch.full((1, NUM_PADDING, 64), 1e3)], dim=1)
    return batch, features


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def added(sums: list[LossSums], name: str) -> Tensor:
    return torch.stack([getattr(s, name).detach() for s in sums]).sum(0)


def test_a_packed_row_is_its_documents_one_at_a_time(drafter: Drafter) -> None:
    objective = objective_of(drafter)
    alone = [objective.loss_sums(features, batch) for batch, features in one_by_one()]
    for sums in alone:
        sums.numerator.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(drafter)
    drafter.zero_grad()

    batch, features = packed()
    together = objective.loss_sums(features, batch)
    together.numerator.backward()  # type: ignore[no-untyped-call]

    for field in dataclasses.fields(LossSums):
        assert torch.allclose(
            getattr(together, field.name).detach().double(),
            added(alone, field.name).double(),
            rtol=1e-5,
        ), field.name
    got = gradients(drafter)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(
            got[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max())
        )


def test_documents_in_one_row_are_rows_of_a_padded_batch(drafter: Drafter) -> None:
    objective, rows = objective_of(drafter), one_by_one()
    lengths = torch.tensor([length for length, _ in DOCUMENTS])
    ids = torch.zeros(3, 12, dtype=torch.long)
    features = torch.full((3, 12, 64), 1e3)
    for i, (batch, row_features) in enumerate(rows):
        ids[i, : lengths[i]] = batch.ids_BL[0]
        features[i, : lengths[i]] = row_features[0]
    anchors = torch.cat([b.anchors_BA for b, _ in rows])

    padded = objective.loss_sums(features, BlockBatch(ids, padded_positions(lengths, 12), anchors))

    together = objective.loss_sums(packed()[1], packed()[0])
    got, wanted = padded.numerator.detach(), together.numerator.detach()
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    assert float(padded.weight) == pytest.approx(float(together.weight), rel=1e-6)


def test_a_batch_without_anchors_gives_zero_gradients_and_no_nan(drafter: Drafter) -> None:
    batch, features = packed()
    empty = BlockBatch(batch.ids_BL, batch.positions_BL, torch.full_like(batch.anchors_BA, -1))

    sums = objective_of(drafter).loss_sums(features, empty)
    sums.numerator.backward()  # type: ignore[no-untyped-call]

    assert float(sums.weight) == 0.0
    assert float(sums.numerator.detach()) == 0.0
    assert all((g == 0).all() for g in gradients(drafter).values())
    assert len(gradients(drafter)) == len(list(drafter.parameters()))


def test_free_slots_change_no_gradient(drafter: Drafter) -> None:
    batch, features = packed()
    used = BlockBatch(batch.ids_BL, batch.positions_BL, batch.anchors_BA[:, :-NUM_FREE_SLOTS])
    objective = objective_of(drafter)
    objective.loss_sums(features, used).numerator.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(drafter)
    drafter.zero_grad()

    objective.loss_sums(features, batch).numerator.backward()  # type: ignore[no-untyped-call]

    for name, gradient in gradients(drafter).items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-4)


def test_the_teacher_judges_a_token_from_the_place_before_it(drafter: Drafter) -> None:
    batch, features = packed()
    objective = objective_of(drafter, LossRecipe(2.0, distillation=1.0, cross_entropy=0.0))
    row_len = batch.ids_BL.shape[1]
    teacher = torch.randn(1, row_len, 32)
    before = objective.loss_sums(features, batch, teacher_BLD=teacher).numerator.detach()

    judges = set()
    for place in range(row_len):
        changed = teacher.clone()
        changed[0, place] += 1
        after = objective.loss_sums(features, batch, teacher_BLD=changed).numerator.detach()
        if not torch.equal(before, after):
            judges.add(place)

    wanted, start = set(), 0
    places = range(1, drafter.config.num_drafts + 1)
    for length, anchors in DOCUMENTS:
        wanted |= {start + a + k - 1 for a in anchors for k in places if a + k < length}
        start += length
    assert judges == wanted
