"""A rank that feeds itself: target and drafter in one process.

One of the two sides of topology.py's rule; the other is paired.py. Between prefetch.py and step.py.
Features are made when the step asks for the next microbatch and not before: they are the largest
thing in memory.

B batch, L context length, F features of the target, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dflash_workers.contract.errors import Draining
from trainer.online.batches import MicroBatch, Place
from trainer.online.features import Features
from trainer.online.prefetch import Prefetch
from trainer.online.step import Fed
from trainer.online.stopwatch import DATA, TARGET, Stopwatch

Work = Callable[[MicroBatch], float]  # operations of target and drafter, of a batch on the host

LOOK_S = 0.5  # how long data are waited for before looking whether to leave


class Eyes:
    """The target's side of a rank: features, and final states where the loss needs them."""

    def __init__(self, features: Features, *, needs_teacher: bool) -> None:
        self._features = features
        self._needs_teacher = needs_teacher

    def look_at(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """[B, L, F], and [B, L, D] or nothing."""
        if self._needs_teacher:
            return self._features.with_states(batch)
        return self._features.of(batch), None


class Pantry:
    """A rank's own microbatches, in order, on its device."""

    def __init__(
        self,
        batches: Prefetch,
        place: Place,
        device: torch.device,
        watch: Stopwatch,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._batches = batches
        self._device = device
        self._watch = watch
        self._is_stopping = is_stopping
        self.place = place  # behind the last one taken

    def take(self, number: int) -> MicroBatch:
        """On the host. Waits for as long as the intake does; raises Draining where this process is
        to leave meanwhile.
        """
        with self._watch.phase(DATA):
            while (batch := self._batches.take(LOOK_S)) is None:
                if self._is_stopping():
                    raise Draining("waiting for data when asked to stop")
        assert batch.number == number, f"microbatch {batch.number} came for {number}"
        self.place = batch.after
        return batch

    def serve(self, batch: MicroBatch) -> MicroBatch:
        """On the device."""
        return batch.to(self._device)


class Colocated:
    """Feeds the drafter of its own process."""

    def __init__(self, pantry: Pantry, eyes: Eyes, work: Work, watch: Stopwatch) -> None:
        self.pantry = pantry
        self._eyes = eyes
        self._work = work
        self._watch = watch

    def feed(self, numbers: Iterable[int]) -> Iterator[Fed]:
        """A step's microbatches that are this rank's."""
        for number in numbers:
            yield self.feed_with(self.pantry.take(number))

    def feed_with(self, batch: MicroBatch) -> Fed:
        """One from elsewhere."""
        work = self._work(batch)
        batch = self.pantry.serve(batch)
        with self._watch.phase(TARGET):
            features_BLF, teacher_BLD = self._eyes.look_at(batch)
        return Fed(batch, features_BLF, teacher_BLD, work)
