"""Where the microbatches' samples come from: a list in memory, or a run's shards as they appear.

Reads shards <- tokens/, hands microbatches to -> train.py by way of prefetch.py. Intake goes by the
order log (order.py), which the leader extends (naming.py) and the other ranks follow; a later epoch
uses the finished order, its shards shuffled. Where samples run short it waits and says so; it never
uses one twice in an epoch. Invariant: a shard whose bytes are not those that were named is not
trained on: its samples become padding, so that no number of a microbatch moves. Memory holds the
shards of one window, and of all others the lengths.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dflash_workers.contract.errors import BadInput, Corrupt, Missing, Transient
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store
from trainer.online.batches import DataRecipe, Place
from trainer.online.naming import Namer
from trainer.online.order import Order, RefusedShard, Shard
from trainer.online.packing import Lengths, rows_of_window, window_len
from trainer.online.walk import Ints, Walk, Window, content_digest, trained_lengths
from trainer.tokens.shards import Sample, read_shard

log = logging.getLogger(__name__)

POLL_S = 5.0  # a look lists all of a run's shards
NUM_READERS = 8
SHARDS_SHUFFLED = 1 << 31  # no window has this number: an epoch's shards have a state of their own

OnWait = Callable[[float, str], None]  # seconds of this wait so far, what is waited for
Thing = TypeVar("Thing")


class ListIntake(Walk):
    """Samples that are in memory, all of them one window."""

    def __init__(self, samples: Sequence[Sample], recipe: DataRecipe, seed: int) -> None:
        """Raises BadInput where a sample is held out, NotEnough where they are too few."""
        super().__init__(recipe, seed)
        heldout = [s.id for s in samples if s.heldout]
        if heldout:
            raise BadInput(f"sample {heldout[0]!r} is held out: it must not be trained on")
        lengths = trained_lengths(
            np.array([s.prompt_len for s in samples], np.int32),
            np.array([len(s.ids) for s in samples], np.int32),
            recipe.max_len,
        )
        self._samples = [s for s, length in zip(samples, lengths, strict=True) if length]
        rows = np.arange(len(self._samples), dtype=np.int32)
        self._window = Window(np.zeros_like(rows), rows, lengths[lengths > 0], None)
        self.check_enough(len(rows))

    def window(self, place: Place) -> Window:
        return self._window

    def samples(self, epoch: int, shards: Collection[int]) -> dict[int, list[Sample]]:
        return {0: self._samples}

    def is_finished(self) -> bool:
        return True

    def digest(self) -> str:
        return content_digest(self._samples, self._window.lengths)

    def largest_id(self) -> int:
        return max(int(s.ids.max()) for s in self._samples)


@dataclass(frozen=True, slots=True)
class RunSource:
    """Which run is followed, and as what."""

    store: Store
    run: str
    name: str  # of the training run: its order stands under train/<name>/
    is_leader: bool  # one rank finds, judges and names shards; the others follow
    overrides: Collection[str] = ()  # rules of the gate that may fail
    poll_s: float = POLL_S


class Intake(Walk):
    """A run's shards, as they appear. Used from one thread, `close` and what is read-only apart."""

    def __init__(
        self, source: RunSource, recipe: DataRecipe, seed: int, *, on_wait: OnWait
    ) -> None:
        """Raises Missing where there is no such run, BadInput for an override that is no rule."""
        super().__init__(recipe, seed)
        self._source = source
        self._vocab_size = read_spec(source.store, source.run).target.vocab_size
        self._order = Order(source.store, source.run, source.name)
        self._namer: Namer | None = None
        if source.is_leader:
            self._namer = Namer(source.store, source.run, self._order, source.overrides)
        self._on_wait = on_wait
        self._lengths: list[Lengths] = []  # of each shard of the order, as trained on
        self._is_enough = False
        self._sequences: dict[int, Ints] = {}  # of the later epochs
        self._held: dict[int, list[Sample] | None] = {}  # by shard; None: not to be used
        self.starved_s = 0.0  # waited for samples so far

    @property
    def judged(self) -> Json:
        """What the gate found last, for a checkpoint; empty before that and on other ranks."""
        return self._namer.judged if self._namer else {}

    @property
    def refused(self) -> dict[str, str]:
        """Shards that are not trained on, with the reason."""
        return dict(self._order.refused)

    @property
    def shards(self) -> Sequence[Shard]:
        """Those in the order so far."""
        return self._order.shards

    def window(self, place: Place) -> Window | None:
        return self._waited_for(lambda: self._find_window(place))

    def samples(self, epoch: int, shards: Collection[int]) -> dict[int, list[Sample]] | None:
        number_of = {place: self._shard_at(epoch, place) for place in shards}
        self._held = {n: self._held[n] for n in number_of.values() if n in self._held}
        missing = [n for n in set(number_of.values()) if n not in self._held]
        read = self._waited_for(lambda: self._read_all(missing))
        if read is None:
            return None
        self._held |= read
        held = {place: self._held.get(number) for place, number in number_of.items()}
        return {place: samples for place, samples in held.items() if samples is not None}

    def is_finished(self) -> bool:
        """After a look: the shards that are there now are named, whether needed yet or not."""
        with suppress(Transient):
            while not self._order.is_finished and self._look():
                pass
        return self._order.is_finished

    def digest(self) -> str:
        """Of the name: what stands under it is written once."""
        named = f"{self._source.run}/{self._source.name}"
        return hashlib.sha256(named.encode()).hexdigest()

    def largest_id(self) -> int:
        return self._vocab_size - 1

    def _find_window(self, place: Place) -> Window | None:
        while (window := self._known_window(place)) is None:
            if not self._look():
                return None
        return window

    def _look(self) -> bool:
        """Whether there is anything new in the order; the leader sees to it."""
        return self._namer.advance() if self._namer else self._order.follow()

    def _known_window(self, place: Place) -> Window | None:
        """From the shards that are in the order; None where they don't fill it yet."""
        is_finished = self._order.is_finished
        self._note_lengths(is_finished)
        if place.epoch and not is_finished:
            return None
        shards, rows, lengths = self._samples_from(place)
        num = window_len(lengths, self.recipe, is_all=is_finished)
        if num is None:
            return None
        end: tuple[int, int] | None = None
        if num < len(lengths):
            end = (int(shards[num]), int(rows[num]))
        elif not is_finished:
            end = (int(shards[-1]), int(rows[-1]) + 1)
        return Window(shards[:num], rows[:num], lengths[:num], end)

    def _samples_from(self, place: Place) -> tuple[Ints, Ints, Lengths]:
        """At least a window of them, where there are so many: shard, row and length of each."""
        wanted = rows_of_window(self.recipe) * (self.recipe.max_len if self.recipe.packed else 1)
        parts: list[tuple[Ints, Ints, Lengths]] = []
        for at in range(place.shard, len(self._order.shards)):
            lengths = self._lengths[self._shard_at(place.epoch, at)]
            rows = np.flatnonzero(lengths).astype(np.int32)
            if at == place.shard:
                rows = rows[rows >= place.row]
            parts.append((np.full(len(rows), at, np.int32), rows, lengths[rows]))
            wanted -= int(lengths[rows].sum()) if self.recipe.packed else len(rows)
            if wanted < 0:
                break
        empty = np.zeros(0, np.int32)
        shards, rows, lengths = (
            np.concatenate([empty, *(part[i] for part in parts)]) for i in range(3)
        )
        return shards, rows, lengths

    def _note_lengths(self, is_finished: bool) -> None:
        for shard in self._order.shards[len(self._lengths) :]:
            self._lengths.append(
                trained_lengths(shard.prompt_lens, shard.lengths, self.recipe.max_len)
            )
        if is_finished and not self._is_enough:
            self.check_enough(sum(int(np.count_nonzero(x)) for x in self._lengths))
            self._is_enough = True

    def _shard_at(self, epoch: int, place: int) -> int:
        """The number in the order of the shard at a place in an epoch's sequence."""
        if epoch == 0:
            return place
        if epoch not in self._sequences:
            random = np.random.default_rng([self.seed, epoch, SHARDS_SHUFFLED])
            shuffled = random.permutation(len(self._order.shards)).astype(np.int32)
            self._sequences = {epoch: shuffled}
        return int(self._sequences[epoch][place])

    def _read_all(self, numbers: Sequence[int]) -> dict[int, list[Sample] | None]:
        with ThreadPoolExecutor(NUM_READERS) as readers:
            found = dict(zip(numbers, readers.map(self._read, numbers), strict=True))
        bad = [x for x in found.values() if isinstance(x, RefusedShard)]
        for refused in bad:
            if refused.key not in self._order.refused:
                log.warning("shard %s is no longer trained on: %s", refused.key, refused.reason)
        if bad and self._namer:
            self._namer.refuse(bad)
        return {n: None if isinstance(x, RefusedShard) else x for n, x in found.items()}

    def _read(self, number: int) -> list[Sample] | RefusedShard:
        """A named shard's samples, or why they are not to be used. Raises StoreUnavailable."""
        shard = self._order.shards[number]
        if shard.key in self._order.refused:
            return RefusedShard(shard.key, self._order.refused[shard.key])
        try:
            body = self._source.store.get(shard.key)
            if hashlib.sha256(body).hexdigest() != shard.sha256:
                raise Corrupt("its bytes are not those that were named: sha256 differs")
            return read_shard(body)
        except (Corrupt, Missing) as error:
            return RefusedShard(shard.key, str(error))

    def _waited_for(self, find: Callable[[], Thing | None]) -> Thing | None:
        """What `find` gives, once it does; None: closed meanwhile. Waits out what is Transient."""
        began = time.monotonic()
        while not self._closed.is_set():
            try:
                if (found := find()) is not None:
                    return found
                lacks = self._namer.lacks if self._namer else "the leader's next shards"
            except Transient as error:
                lacks = str(error)
            self._on_wait(time.monotonic() - began, lacks)
            paused = time.monotonic()
            self._closed.wait(self._source.poll_s)
            self.starved_s += time.monotonic() - paused
        return None
