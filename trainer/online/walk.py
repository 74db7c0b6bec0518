"""The walk over windows of samples that gives the microbatches, numbered over all epochs.

Base of intake.py's two sources, which say where a window's samples lie. A window is shuffled by
(seed, epoch, window) and arranged by packing.py; of its microbatches those that a rank calls its
own are built by batches.py, and the others cost no more than counting. Invariant: microbatch g is
the same bits for every rank and after every stop, because nothing here depends on the time, on
ranks or on what was asked for before.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dflash_workers.contract.errors import Conflict, NotEnough
from trainer.online.batches import DataRecipe, MicroBatch, Place, make_microbatch
from trainer.online.packing import Lengths, Rows, arrange, num_microbatches

if TYPE_CHECKING:
    from trainer.tokens.shards import Sample

MIN_LOSS_TOKENS = 2  # an anchor, and the token that its block asks for first

Ints = npt.NDArray[np.int32]
Mine = Callable[[int], bool]  # of a microbatch's number


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Samples that are shuffled together; the arrays run in step, one entry per sample."""

    shards: Ints  # by place in the epoch's sequence of shards
    rows: Ints  # in the shard
    lengths: Lengths
    end: tuple[int, int] | None  # shard and row where the next one begins; None: the epoch ends

    def __len__(self) -> int:
        return len(self.lengths)


class Walk(ABC):
    """Microbatches without end, epoch after epoch, from any place."""

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self.recipe = recipe
        self.seed = seed
        self._closed = threading.Event()
        self._num_by_epoch: dict[int, int] = {}

    def microbatches(self, place: Place, *, mine: Mine) -> Iterator[MicroBatch]:
        """Those from `place` on whose numbers are `mine`, in order. Ends only by `close`.

        Raises Conflict for a place of another seed.
        """
        if place.seed != self.seed:
            raise Conflict(f"training began with seed {place.seed}, this is {self.seed}")
        while not self._closed.is_set() and (window := self.window(place)) is not None:
            yield from self._of_window(window, place, mine)
            place = self._behind(window, place)

    def close(self) -> None:
        """End the walk, also where it waits or passes over what is not its own, from any thread.
        Safe to call twice.
        """
        self._closed.set()

    def total_microbatches(self, num_epochs: int) -> int | None:
        """Of the first epochs; None while more samples may come."""
        if not self.is_finished():
            return None
        return sum(self._num_of_epoch(epoch) for epoch in range(num_epochs))

    @abstractmethod
    def window(self, place: Place) -> Window | None:
        """The window that begins at a place, once it is known. None: closed meanwhile."""

    @abstractmethod
    def samples(self, epoch: int, shards: Collection[int]) -> dict[int, list[Sample]] | None:
        """By place in the epoch's sequence, without shards that can't be used. None: closed."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether all samples are known."""

    @abstractmethod
    def digest(self) -> str:
        """Hash of what tells these samples from others; a stopped run goes on only with them."""

    @abstractmethod
    def largest_id(self) -> int:
        """No sample holds a larger one: to be compared with the target's vocabulary."""

    def check_enough(self, num_samples: int) -> None:
        """Raise NotEnough where they are too few to learn from."""
        if num_samples < self.recipe.min_samples:
            raise NotEnough(
                f"{num_samples} samples of at most {self.recipe.max_len} tokens to train on, at "
                f"least {self.recipe.min_samples} are needed: has `tokenize` run?"
            )

    def _of_window(self, window: Window, place: Place, mine: Mine) -> Iterator[MicroBatch]:
        first = place.number - place.index
        total = num_microbatches(window.lengths, self.recipe)
        chosen = [i for i in range(place.index, total) if mine(first + i)]
        if not chosen:
            return
        random = np.random.default_rng([self.seed, place.epoch, place.window])
        batches = arrange(window.lengths, self.recipe, random)
        needed = {int(window.shards[i]) for at in chosen for row in batches[at] for i in row}
        samples = self.samples(place.epoch, needed)
        if samples is None:
            return
        for index in chosen:
            at = replace(place, index=index, number=first + index)
            is_last = index + 1 == total
            after = replace(at, index=index + 1, number=at.number + 1)
            yield make_microbatch(
                _looked_up(batches[index], window, samples),
                self.recipe,
                at=at,
                after=self._behind(window, place) if is_last else after,
            )

    def _behind(self, window: Window, place: Place) -> Place:
        """The place of the window after this one."""
        number = place.number - place.index + num_microbatches(window.lengths, self.recipe)
        if window.end is None:
            return Place(epoch=place.epoch + 1, number=number, seed=place.seed)
        shard, row = window.end
        return Place(place.epoch, shard, row, place.window + 1, 0, number, place.seed)

    def _num_of_epoch(self, epoch: int) -> int:
        if epoch not in self._num_by_epoch:
            place = Place(epoch=epoch, seed=self.seed)
            while place.epoch == epoch and (window := self.window(place)) is not None:
                place = self._behind(window, place)
            self._num_by_epoch[epoch] = place.number
        return self._num_by_epoch[epoch]


def trained_lengths(prompt_lens: Ints, lengths: Ints, max_len: int) -> Lengths:
    """What the samples are cut to; 0 for those whose loss doesn't fit."""
    cut = np.minimum(lengths, max_len)
    return np.where(prompt_lens + MIN_LOSS_TOKENS <= cut, cut, 0).astype(np.int32)


def content_digest(samples: Collection[Sample], lengths: Lengths) -> str:
    """Hash of samples, as far as they are trained on."""
    digest = hashlib.sha256()
    for sample, length in zip(samples, lengths, strict=True):
        digest.update(f"{sample.prompt_key}:{sample.turn}:{sample.prompt_len}:".encode())
        digest.update(sample.ids[:length].astype("<i4").tobytes())
    return digest.hexdigest()


def _looked_up(
    rows: Rows, window: Window, samples: dict[int, list[Sample]]
) -> list[list[tuple[Sample, int]]]:
    return [
        [
            (samples[int(window.shards[i])][window.rows[i]], int(window.lengths[i]))
            for i in row
            if int(window.shards[i]) in samples
        ]
        for row in rows
    ]
