"""What a microbatch holds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.drafter.anchors import NO_ANCHOR
from trainer.online.batches import NO_DOCUMENT, DataRecipe, MicroBatch, Place, make_microbatch
from trainer.tokens.shards import Sample

MakeSamples = Callable[..., list[Sample]]
PADDED = DataRecipe(batch_size=4, num_anchors=5, max_len=64)
PACKED = DataRecipe(batch_size=3, num_anchors=9, max_len=64, packed=True)
AT, AFTER = Place(epoch=2, number=7, seed=3), Place(epoch=2, index=1, number=8, seed=3)


def padded(samples: list[Sample]) -> MicroBatch:
    return make_microbatch([[(s, len(s.ids))] for s in samples], PADDED, at=AT, after=AFTER)


def packed(samples: list[Sample]) -> MicroBatch:
    """Two rows of two samples, and an empty one."""
    sized = [(s, len(s.ids)) for s in samples]
    return make_microbatch([sized[:2], sized[2:4]], PACKED, at=AT, after=AFTER)


def test_a_padded_microbatch_is_a_packed_one_with_a_document_a_row(
    make_samples: MakeSamples,
) -> None:
    samples = make_samples(4)

    batch = padded(samples)

    longest = max(len(s.ids) for s in samples)
    assert batch.ids_BL.shape == (4, -(-longest // 8) * 8)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        assert batch.ids_BL[row, :length].tolist() == sample.ids.tolist()
        assert batch.positions_BL[row, :length].tolist() == list(range(length))
        assert not batch.positions_BL[row, length:].any()
        assert (batch.documents_BL[row, :length] == 0).all()
        assert (batch.documents_BL[row, length:] == NO_DOCUMENT).all()
        assert batch.samples[row] == [(f"{sample.prompt_key}:0", 0, length)]
    assert batch.num_tokens == sum(len(s.ids) for s in samples)
    assert (batch.number, batch.after) == (7, AFTER)


def test_a_packed_microbatch_has_one_shape_whatever_it_holds(make_samples: MakeSamples) -> None:
    samples = make_samples(4)

    batch = packed(samples)

    assert batch.ids_BL.shape == batch.positions_BL.shape == batch.documents_BL.shape == (3, 64)
    assert batch.anchors_BA.shape == (3, 9)
    assert batch.samples[2] == []
    assert (batch.anchors_BA[2] == NO_ANCHOR).all()
    for row, (first, second) in enumerate([samples[:2], samples[2:4]]):
        here, there = len(first.ids), len(first.ids) + len(second.ids)
        assert batch.ids_BL[row, :there].tolist() == [*first.ids, *second.ids]
        assert batch.positions_BL[row, here - 1 : here + 2].tolist() == [here - 1, 0, 1]
        assert batch.documents_BL[row, here - 1 : here + 1].tolist() == [0, 1]
        assert [placed.start for placed in batch.samples[row]] == [0, here]


def test_anchors_lie_where_a_generated_token_follows_in_the_same_document(
    make_samples: MakeSamples,
) -> None:
    samples = make_samples(4)

    batch = packed(samples)

    wanted = set()
    for row, pair in enumerate([samples[:2], samples[2:4]]):
        start = 0
        for sample in pair:
            inside = range(start + sample.prompt_len, start + len(sample.ids) - 1)
            wanted |= {(row, place) for place in inside}
            start += len(sample.ids)
    drawn = {
        (row, place) for row, places in enumerate(batch.anchors_BA.tolist()) for place in places
    }
    assert {x for x in drawn if x[1] != NO_ANCHOR} <= wanted
    assert len(drawn) == 2 * 9 + 1


def test_a_cut_sample_ends_at_its_length(make_samples: MakeSamples) -> None:
    (sample,) = make_samples(1, answer_len=40)
    length = sample.prompt_len + 4

    batch = make_microbatch([[(sample, length)]], PADDED, at=AT, after=AFTER)

    assert batch.num_tokens == length
    assert int(batch.anchors_BA.max()) == length - 2
    assert not batch.ids_BL[0, length:].any()


def test_anchors_differ_between_epochs_and_seeds_and_nothing_else(
    make_samples: MakeSamples,
) -> None:
    samples = make_samples(4, answer_len=40)
    rows = [[(s, len(s.ids))] for s in samples]

    def anchors(at: Place) -> torch.Tensor:
        return make_microbatch(rows, PADDED, at=at, after=AFTER).anchors_BA

    same = Place(epoch=2, shard=5, row=6, window=8, index=9, number=100, seed=3)
    assert torch.equal(anchors(AT), anchors(same))
    assert not torch.equal(anchors(AT), anchors(Place(epoch=3, seed=3)))
    assert not torch.equal(anchors(AT), anchors(Place(epoch=2, seed=4)))
