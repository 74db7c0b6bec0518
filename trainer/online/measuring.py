"""Measured acceptance during training: the drafter walked along held-out answers.

Called by train.py every few hundred steps, on recorded answers of prompts that are never trained
on: from each place the drafter drafts a block, and the walk goes on behind the drafts that hit, as
decoding would along this very answer. One look of the target at each answer is all that it costs of
the target. evaluate.py decodes for real, on an export. Invariant: a sample's figure is a function
of weights and sample alone.

B batch (1), L context length, A anchors, K places, D hidden, F features of the target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import orjson
import torch
from torch import Tensor

from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.store import Store
from trainer.drafter.model import Drafter
from trainer.drafter.objective import TargetEnds
from trainer.online.batches import DataRecipe, MicroBatch, Place, make_microbatch
from trainer.online.step import Fed
from trainer.online.walk import MIN_LOSS_TOKENS
from trainer.tokens.reading import list_small_shards
from trainer.tokens.shards import Sample, read_shard

BLOCKS_AT_ONCE = 64  # of an answer: the mask is blocks by context


class Heldout:
    """The samples that are measured: the first `most` that fit, fixed once there are so many."""

    def __init__(self, samples: Iterator[Sample], recipe: DataRecipe, most: int) -> None:
        """`samples`: held-out ones; may be asked again where it ended, as more may have come."""
        self._samples = samples
        self._recipe = recipe
        self._most = most
        self._chosen: list[Sample] = []

    def choose(self) -> list[Sample]:
        """Look for what is still lacking."""
        while len(self._chosen) < self._most and (sample := next(self._samples, None)):
            if sample.prompt_len + MIN_LOSS_TOKENS <= min(len(sample.ids), self._recipe.max_len):
                self._chosen.append(sample)
        return self._chosen


def heldout_batches(samples: Sequence[Sample], recipe: DataRecipe) -> list[tuple[MicroBatch, int]]:
    """One sample a batch, each with its prompt's length."""
    recipe = replace(recipe, packed=False)
    return [
        (
            make_microbatch(
                [[(s, min(len(s.ids), recipe.max_len))]], recipe, at=Place(), after=Place()
            ),
            s.prompt_len,
        )
        for s in samples
    ]


class StoredHeldout(Iterator[Sample]):
    """A run's held-out samples, shard by shard; goes on with new shards after it ended."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._seen: set[str] = set()  # keys
        self._unread: deque[str] = deque()
        self._ready: deque[Sample] = deque()

    def __next__(self) -> Sample:
        while not self._ready:
            if not self._unread:
                self._look()
            if not self._unread:
                raise StopIteration
            # What can't be read is the intake's to report.
            with suppress(Corrupt, Missing):
                samples = read_shard(self._store.get(self._unread.popleft()))
                self._ready.extend(s for s in samples if s.heldout)
        return self._ready.popleft()

    def _look(self) -> None:
        for key in list_small_shards(self._store, self._run):
            if key not in self._seen:
                self._seen.add(key)
                self._unread.append(key)


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """For other ranks: what is measured of a sample."""
    return orjson.dumps([[s.prompt_key, s.turn, s.ids.tolist(), s.prompt_len] for s in samples])


def unpack_samples(body: bytes) -> list[Sample]:
    """Inverse of pack_samples."""
    return [
        Sample(key, "", turn, np.array(ids, np.int32), prompt_len, -1, True, "", [])
        for key, turn, ids, prompt_len in orjson.loads(body)
    ]


@torch.no_grad()
def measured_accept_length(
    drafter: Drafter, ends: TargetEnds, answers: Iterable[tuple[Fed, int]]
) -> float | None:
    """Tokens per verify step, mean over answers; None without one. With each answer comes its
    prompt's length.
    """
    means = []
    for fed, prompt_len in answers:
        length = int((fed.batch.documents_BL[0] >= 0).sum())
        features_1LF = fed.features_BLF[:1, :length].to(drafter.fc.weight.dtype)
        steps = tokens_by_step(
            drafter, ends, fed.batch.ids_BL[:1, :length], features_1LF, prompt_len
        )
        means.append(sum(steps) / len(steps))
    return sum(means) / len(means) if means else None


def tokens_by_step(
    drafter: Drafter, ends: TargetEnds, ids_1L: Tensor, features_1LF: Tensor, prompt_len: int
) -> list[int]:
    """Of each verify step along an answer: the drafts that hit, and the target's own token."""
    ids: list[int] = ids_1L[0].tolist()
    context = drafter.read_context(features_1LF)
    steps: list[int] = []
    place = prompt_len
    drafts: list[list[int]] = []
    first = place
    while place + 1 < len(ids):
        if place - first >= len(drafts):
            first = place
            drafts = _drafts(drafter, ends, ids_1L, context, range(place, len(ids) - 1))
        rest = ids[place + 1 :]
        hits = _num_hits(drafts[place - first], rest)
        steps.append(min(hits + 1, len(rest)))
        place += steps[-1]
    return steps


def _drafts(
    drafter: Drafter,
    ends: TargetEnds,
    ids_1L: Tensor,
    context: list[tuple[Tensor, Tensor]],
    places: range,
) -> list[list[int]]:
    anchors_1A = torch.tensor([list(places[:BLOCKS_AT_ONCE])], device=ids_1L.device)
    block_1QD = ends.embed(drafter.block_ids(ids_1L, anchors_1A)).to(context[0][0].dtype)
    hidden_1QD = drafter(block_1QD, context, anchors_1A)
    hidden_AKD = hidden_1QD[0].unflatten(0, (-1, drafter.config.block_size))
    head = drafter.markov_head
    found: list[list[int]] = head.draft(hidden_AKD, ids_1L[0, anchors_1A[0]], ends.head_VD).tolist()
    return found


def _num_hits(drafts: Sequence[int], truth: Sequence[int]) -> int:
    pairs = enumerate(zip(drafts, truth, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(truth)))
