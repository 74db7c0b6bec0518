"""What an engine is asked, and what it gave: the words between rollout, engine and the dialects.

Made by rollout (Question) and by engine (Generation, once the reply is checked). Ids are the data:
what is asked and what comes back are ids in both dialects, and a road that had only text says so
in `notes`. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_workers.contract.records import Json, Sampling

# Two more ways to finish, beside quality.STOP and quality.LENGTH.
STOP_STRING = "stop_string"  # at a string; its ids stay in the output
ABORT = "abort"  # we ended it: the ids so far

# Notes on a Generation, for Answer.flags.
STOP_ID_APPENDED = "stop_id_appended"  # the engine leaves out the id that stopped it
STOP_ID_UNKNOWN = "stop_id_unknown"  # it does, and doesn't say which it was
TEXT_ROAD = "text_road"  # the ids are the answer's text, tokenised again


def are_ids(values: Sequence[object], vocab_size: int) -> bool:
    """Whether all are ids of such a vocabulary. In passes that take no call per id."""
    return not values or (
        set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size  # type: ignore[type-var,operator]
    )


# Hears all ids so far while they are sampled; returning False ends the generation.
Heard = Callable[[list[int]], bool]


class Leaving(asyncio.Event):
    """Set once what runs is to end. Who watches is told in the very step that sets it, which takes
    no task for each that might have to hear of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watchers: set[Callable[[], None]] = set()

    def watch(self, tell: Callable[[], None]) -> None:
        """Have it called by `set`, until `unwatch`."""
        self._watchers.add(tell)

    def unwatch(self, tell: Callable[[], None]) -> None:
        """Safe to call twice."""
        self._watchers.discard(tell)

    def set(self) -> None:
        """Safe to call twice."""
        if not self.is_set():
            super().set()
            for tell in tuple(self._watchers):
                tell()


@dataclass(slots=True)
class Growth:
    """A batch's, as its deadline sees it: new ids, and turns that ended."""

    at_s: float = field(default_factory=time.monotonic)  # the last

    def note(self) -> None:
        """It grew."""
        self.at_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is wanted."""

    input_ids: list[int]  # may go on with a half-finished answer, where the dialect takes ids
    seed: int
    sampling: Sampling
    vocab_size: int
    messages: list[Json] = field(default_factory=list)  # for a dialect that renders them itself
    tools: list[Json] = field(default_factory=list)
    template_kwargs: Json = field(default_factory=dict)
    growth: Growth = field(default_factory=Growth)  # of the whole batch


@dataclass(frozen=True, slots=True)
class Shown:
    """What the first of an answer's ids say, special tokens shown."""

    num_ids: int
    text: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer as the engine sampled it."""

    output_ids: list[int]  # stop id included
    finish_reason: str  # stop | length | stop_string | abort
    cached_tokens: int
    latency_s: float
    spec: Json  # speculation statistics
    notes: tuple[str, ...] = ()
    shown: Shown | None = None  # as decoded for the check of the reply; None: it was not
