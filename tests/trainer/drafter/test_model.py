"""The two ways to run a drafter agree, and it sees what it may see only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.model import Drafter

LENGTH = 12


def run(drafter: Drafter, features: Tensor, block: Tensor, anchors: Tensor) -> Tensor:
    with torch.no_grad():
        states: Tensor = drafter(block, drafter.read_context(features), anchors)
    return states


def test_all_blocks_at_once_are_each_block_alone_with_a_cache(drafter: Drafter) -> None:
    torch.manual_seed(0)
    anchors = torch.tensor([[2, 5, 6, 11]])
    features, block = torch.randn(1, LENGTH, 64), torch.randn(1, 16, 32)

    together = run(drafter, features, block, anchors)

    for slot, anchor in enumerate([2, 5, 6, 11]):
        part = slice(4 * slot, 4 * slot + 4)
        first, rest = features[:, :1], features[:, 1:anchor]
        with torch.no_grad():
            cached = [
                (torch.cat((k, more_k), 2), torch.cat((v, more_v), 2))
                for (k, v), (more_k, more_v) in zip(
                    drafter.read_context(first),
                    drafter.read_context(rest, first_position=1),
                    strict=True,
                )
            ]
            alone = drafter(block[:, part], cached, torch.tensor([[anchor]]))
        assert torch.allclose(together[:, part], alone, atol=1e-5)


def test_nothing_at_or_after_the_anchor_and_no_other_block_reaches_a_block(
    drafter: Drafter,
) -> None:
    torch.manual_seed(0)
    anchors = torch.tensor([[4, 6]])
    features, block = torch.randn(1, LENGTH, 64), torch.randn(1, 8, 32)
    before = run(drafter, features, block, anchors)

    features[:, 4:] += 1.0
    block[:, 4:] += 1.0
    after = run(drafter, features, block, anchors)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_the_feature_just_before_the_anchor_reaches_the_block(drafter: Drafter) -> None:
    torch.manual_seed(0)
    anchors = torch.tensor([[4]])
    features, block = torch.randn(1, LENGTH, 64), torch.randn(1, 4, 32)
    before = run(drafter, features, block, anchors)

    features[:, 3] += 1.0

    assert not torch.allclose(before, run(drafter, features, block, anchors))


def test_a_slot_without_anchor_gives_finite_states_and_gradients(drafter: Drafter) -> None:
    anchors = torch.tensor([[4, -1], [-1, -1]])
    block = torch.randn(2, 8, 32, requires_grad=True)

    states = drafter(block, drafter.read_context(torch.randn(2, LENGTH, 64)), anchors)
    states.sum().backward()

    assert states.isfinite().all()
    assert block.grad is not None
    assert block.grad.isfinite().all()
    backbone = [p for n, p in drafter.named_parameters() if not n.startswith("markov_head")]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone)


def test_a_block_starts_with_its_anchors_token_and_goes_on_in_masks(drafter: Drafter) -> None:
    ids = torch.tensor([[10, 11, 12]])

    block = drafter.block_ids(ids, torch.tensor([[2, 0]]))

    assert block.tolist() == [[12, 511, 511, 511, 10, 511, 511, 511]]


def test_features_of_another_target_are_refused(drafter: Drafter) -> None:
    with pytest.raises(BadInput):
        drafter.read_context(torch.randn(1, LENGTH, 32))
