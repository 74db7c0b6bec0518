"""Walks over samples and runs, and what came of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from tests.trainer.online.growing import GrowingRun
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.intake import Intake, OnWait, RunSource
from trainer.online.walk import Walk
from trainer.tokens.shards import Sample

PADDED = DataRecipe(batch_size=4, num_anchors=5, max_len=64, buffer_rows=16)
PACKED = DataRecipe(batch_size=2, num_anchors=5, max_len=64, buffer_rows=8, packed=True)


class Starved(Exception):
    """A test's way out of a wait."""


def give_up(waited_s: float, lacks: str) -> None:
    raise Starved(lacks)


def follow(
    run: GrowingRun,
    recipe: DataRecipe = PADDED,
    *,
    is_leader: bool = True,
    on_wait: OnWait = give_up,
    overrides: Sequence[str] = (),
) -> Intake:
    source = RunSource(run.store, run.spec.run, "one", is_leader, overrides, poll_s=0.02)
    return Intake(source, recipe, 0, on_wait=on_wait)


def taken(walk: Walk, num: int | None, place: Place | None = None) -> list[MicroBatch]:
    """The next microbatches from a place on; None: no more than an epoch has."""
    if num is None:
        num = walk.total_microbatches(1)
        assert num is not None
    return list(itertools.islice(walk.microbatches(place or Place(), mine=lambda g: True), num))


def keys_of(batches: Sequence[MicroBatch]) -> Counter[str]:
    """How often each sample stands in them."""
    return Counter(s.key for batch in batches for row in batch.samples for s in row)


def once_each(samples: Sequence[Sample]) -> dict[str, int]:
    """What `keys_of` gives where each of these stands there once."""
    return {f"{s.prompt_key}:{s.turn}": 1 for s in samples}


def same(one: MicroBatch, other: MicroBatch) -> bool:
    """Bit for bit."""
    return (
        all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))
        and one.samples == other.samples
        and one.number == other.number
    )
