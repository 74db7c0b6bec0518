"""Ranks that have a drafter each and one target together: colocated, with a split target.

Stands where colocated.py does, for targets that splitting.py has split. All ranks of a target look
at the microbatches of all of them, one after the other, and each keeps the features of its own.
Invariant: they look at as many microbatches as they are before any of them trains, so that the
drafters work at the same time and none holds more than one microbatch's features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer.online.batches import MicroBatch
from trainer.online.colocated import Colocated, Eyes, Pantry, Work
from trainer.online.ranks import Ranks
from trainer.online.step import Fed
from trainer.online.stopwatch import Stopwatch


class Together(Colocated):
    """Feeds the drafter of its own process."""

    def __init__(
        self, ranks: Ranks, pantry: Pantry, eyes: Eyes, work: Work, watch: Stopwatch
    ) -> None:
        super().__init__(pantry, eyes, work, watch)
        self._ranks = ranks

    def feed(self, numbers: Iterable[int]) -> Iterator[Fed]:
        """Of a step's microbatches of all ranks of the target, those that are this rank's."""
        topology = self._ranks.topology
        held: list[Fed] = []
        for number in numbers:
            fed = self.feed_with(self.pantry.take(number))
            if topology.eater(number) == self._ranks.rank:
                held.append(fed)
            del fed  # another rank's features go before the next ones are made
            if (number + 1) % topology.ranks_per_target == 0:
                while held:
                    yield held.pop()
        yield from held

    def feed_with(self, batch: MicroBatch) -> Fed:
        """One from elsewhere, which all ranks of the target look at."""
        with self._ranks.translated():
            return super().feed_with(batch)
