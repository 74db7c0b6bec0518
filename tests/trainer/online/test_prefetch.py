"""Microbatches made ahead by a thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from dflash_workers.contract.errors import NotEnough
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.intake import ListIntake
from trainer.online.prefetch import Prefetch
from trainer.online.walk import Mine
from trainer.tokens.shards import Sample

CPU = torch.device("cpu")
RECIPE = DataRecipe(batch_size=2, num_anchors=3, max_len=64)
MakeSamples = Callable[..., list[Sample]]


class Slow(ListIntake):
    """Counts what it has given, may wait before it, fail after some, or end."""

    def __init__(self, samples: list[Sample], *, pause_s: float = 0.0, fails_at: int = -1) -> None:
        super().__init__(samples, RECIPE, 0)
        self.num_given = 0
        self._pause_s = pause_s
        self._fails_at = fails_at
        self._closed = threading.Event()

    def microbatches(self, place: Place, *, mine: Mine) -> Iterator[MicroBatch]:
        for batch in super().microbatches(place, mine=mine):
            if self._closed.wait(self._pause_s):
                return
            if self.num_given == self._fails_at:
                raise NotEnough("the data failed the gate")
            self.num_given += 1
            yield batch

    def close(self) -> None:
        self._closed.set()


def prefetch(walk: ListIntake, depth: int = 3) -> Prefetch:
    return Prefetch(walk, Place(), mine=lambda g: True, device=CPU, depth=depth)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_microbatches_come_in_their_order_and_no_more_are_made_than_asked_ahead(
    make_samples: MakeSamples,
) -> None:
    walk = Slow(make_samples(20))
    wanted = itertools.islice(walk.microbatches(Place(), mine=lambda g: True), 5)
    numbers = [batch.number for batch in wanted]
    walk.num_given = 0

    with prefetch(walk) as batches:
        wait_until(lambda: walk.num_given == 4)  # three that are ready, one at the full queue
        got = [batch.number for batch in itertools.islice(batches, 5)]
        wait_until(lambda: walk.num_given == 9)

    assert got == numbers == [0, 1, 2, 3, 4]
    assert walk.num_given == 9


def test_what_is_not_there_in_time_is_none_and_the_wait_is_counted(
    make_samples: MakeSamples,
) -> None:
    with prefetch(Slow(make_samples(20), pause_s=30)) as batches:
        assert batches.take(0.05) is None

        assert batches.waited_s >= 0.05


def test_an_error_of_the_thread_reaches_the_caller_each_time_behind_what_was_ready(
    make_samples: MakeSamples,
) -> None:
    with prefetch(Slow(make_samples(20), fails_at=2)) as batches:
        first, second = batches.take(20), batches.take(20)
        for _ in range(2):
            with pytest.raises(NotEnough, match="gate"):
                batches.take(20)

    assert first is not None and second is not None
    assert (first.number, second.number) == (0, 1)


@pytest.mark.parametrize("pause_s", [0.0, 30.0], ids=["at a full queue", "in a wait for samples"])
def test_closing_leaves_no_thread_behind(make_samples: MakeSamples, pause_s: float) -> None:
    batches = prefetch(Slow(make_samples(20), pause_s=pause_s), depth=1)

    began = time.monotonic()
    batches.close()
    batches.close()

    assert time.monotonic() - began < 10
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}


def test_an_iteration_ends_where_the_walk_ends(make_samples: MakeSamples) -> None:
    walk = Slow(make_samples(20))

    with prefetch(walk, depth=2) as batches:
        wait_until(lambda: walk.num_given == 3)
        walk.close()
        rest = list(batches)

    assert [batch.number for batch in rest] == [0, 1, 2]
