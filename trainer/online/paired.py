"""Targets that feed other ranks' drafters: features travel, by topology.py's rule.

Both sides walk the same row of microbatches, so that only features cross and both know their shape.
A target looks at the next microbatch while the drafter is at work on the one before, at most ROOM
ahead of what has arrived, also over the end of a step: its forward hides behind the drafter's step.
A drafter has ROOM receives open within a step, so that all transfers but a step's first hide, too;
none is open between steps, where training may end. Invariant: see topology.py; each side posts in
ascending order of numbers.

B batch, L context length, F features of the target, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from trainer.online.batches import MicroBatch
from trainer.online.colocated import Eyes, Pantry, Work
from trainer.online.ranks import Awaited, Ranks, Sent
from trainer.online.step import Fed
from trainer.online.stopwatch import TARGET, TRANSFER, Stopwatch

ROOM = 2  # microbatches' features under way between two ranks: one in use, one to come


class Sender:
    """A target's rank; of a target that is split, each of its ranks, of which the first sends."""

    def __init__(self, ranks: Ranks, pantry: Pantry, eyes: Eyes, watch: Stopwatch) -> None:
        self.pantry = pantry
        self._ranks = ranks
        self._eyes = eyes
        self._watch = watch
        self._sends = ranks.rank == ranks.topology.target_of(ranks.rank)[0]
        self._sent: deque[Sent] = deque()

    def serve(self, numbers: Iterable[int]) -> None:
        """Look at a step's microbatches that are this rank's, and send what was seen."""
        for number in numbers:
            batch = self.pantry.take(number)
            self.send(batch, self._ranks.topology.eater(number))

    def send(self, batch: MicroBatch, to: int) -> None:
        """One batch's features."""
        while len(self._sent) >= ROOM:
            self._settle_one()
        with self._watch.phase(TARGET), self._ranks.translated():
            seen = [t for t in self._eyes.look_at(self.pantry.serve(batch)) if t is not None]
        if not self._sends:
            return
        message = torch.cat(seen, dim=-1) if len(seen) > 1 else seen[0]
        self._sent.append(self._ranks.send(message, to))

    def settle(self) -> None:
        """Until all has arrived."""
        while self._sent:
            self._settle_one()

    def _settle_one(self) -> None:
        with self._watch.phase(TRANSFER):
            self._sent.popleft().wait()


class Receiver:
    """A drafter's rank, fed from elsewhere."""

    def __init__(
        self,
        ranks: Ranks,
        pantry: Pantry,
        *,
        widths: tuple[int, int],
        dtype: torch.dtype,
        work: Work,
        watch: Stopwatch,
    ) -> None:
        """`widths`: of features, and of final states (0: none); `dtype`: of both."""
        self.pantry = pantry
        self._ranks = ranks
        self._widths = widths
        self._dtype = dtype
        self._work = work
        self._watch = watch

    def feed(self, numbers: Iterable[int]) -> Iterator[Fed]:
        """A step's microbatches that are this rank's."""
        posted: deque[tuple[MicroBatch, Awaited]] = deque()
        for number in numbers:
            batch = self.pantry.take(number)
            posted.append((batch, self._post(batch, self._ranks.topology.sender(number))))
            if len(posted) == ROOM:
                yield self._take(*posted.popleft())
        while posted:
            yield self._take(*posted.popleft())

    def feed_with(self, batch: MicroBatch) -> Fed:
        """One from elsewhere, which the first target has, too."""
        return self._take(batch, self._post(batch, self._ranks.topology.sender(0)))

    def _post(self, batch: MicroBatch, sender: int) -> Awaited:
        shape = (*batch.ids_BL.shape, sum(self._widths))
        return self._ranks.receive(shape, self._dtype, sender)

    def _take(self, batch: MicroBatch, awaited: Awaited) -> Fed:
        with self._watch.phase(TRANSFER):
            message_BLX = awaited.take()
        features_BLF, teacher_BLD = _split(message_BLX, self._widths)
        work = self._work(batch)
        return Fed(self.pantry.serve(batch), features_BLF, teacher_BLD, work)


def _split(message_BLX: Tensor, widths: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    if not widths[1]:
        return message_BLX, None
    return message_BLX[..., : widths[0]], message_BLX[..., widths[0] :]
