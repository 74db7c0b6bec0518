"""What the turns of all batches have for Redis, and what they ask it: one round trip for them all.

Called by journal. One thread carries, in one pipeline, whatever came together while the trip before
was under way. Nobody is told that something is written before Redis has said so. A connection that
fails fails all who were on that trip alike, and all who wait by then; a reply that is an error is
one batch's alone, and what the others wrote stands. Redis runs one trip's commands in their order,
but other clients' between them: what must happen at once is one command.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import redis

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.hints import translated_redis

Command = tuple[str | int | bytes, ...]
Over = Future[None] | asyncio.Future[None]  # for a thread that waits, or in an event loop

_TOGETHER = 16  # passengers on one trip at most, as each may bring hundreds of KB


class Passenger(Protocol):
    """Who has something for Redis. Called from the carrying thread alone, by turns."""

    def commands(self) -> list[Command]:
        """What it has now, or as much of it as Redis does without keeping others waiting."""

    def hear(self, replies: Sequence[Any]) -> bool:
        """The commands' replies, none of them an error; whether it has more that was there."""

    def miss(self, error: QueueUnavailable) -> None:
        """The commands may have been run or not: Redis is away, or can't do them now."""


class RoundTrips:
    """Over one client. Safe to share between threads; its own starts with the first trip."""

    def __init__(self, client: redis.Redis, where: str) -> None:
        self._client = client
        self._where = where
        self._waiting: dict[Passenger, list[Over]] = {}
        self._is_under_way = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "round-trips")

    def join(self, passenger: Passenger, over: Over) -> None:
        """Be on the next trip, whoever starts it. `over` ends once all that the passenger has now
        was heard or missed; it fails with what no passenger expects, such as AccessDenied.
        """
        with self._lock:
            self._waiting.setdefault(passenger, []).append(over)

    def go(self) -> None:
        """Start it, after the one that is under way. Nothing happens where nobody has joined."""
        with self._lock:
            if self._is_under_way or not self._waiting:
                return
            self._is_under_way = True
        self._thread.submit(self._travel)

    def _travel(self) -> None:
        while aboard := self._board():
            unfinished: list[Passenger] = []
            try:
                unfinished = self._trip(aboard)
            except QueueUnavailable as error:
                with self._lock:
                    waiting = self._take(None)  # they would wait as long for the same
                for passenger, overs in waiting.items():
                    aboard.setdefault(passenger, []).extend(overs)
                for passenger in aboard:
                    passenger.miss(error)
            except Exception as error:  # the outermost frame of a trip: all who wait for it hear
                _end(aboard, error)
                continue
            with self._lock:
                for passenger in unfinished:
                    self._waiting.setdefault(passenger, [])[:0] = aboard.pop(passenger)
            _end(aboard, None)

    def _board(self) -> dict[Passenger, list[Over]]:
        """Who is on the next trip; nobody, and the thread ends."""
        with self._lock:
            aboard = self._take(_TOGETHER)
            self._is_under_way = bool(aboard)
            return aboard

    def _take(self, most: int | None) -> dict[Passenger, list[Over]]:
        first = list(itertools.islice(self._waiting, most))
        return {passenger: self._waiting.pop(passenger) for passenger in first}

    def _trip(self, passengers: Iterable[Passenger]) -> list[Passenger]:
        """There and back; who has more for the next one."""
        packed = [(passenger, passenger.commands()) for passenger in passengers]
        replies = iter(self._carry([c for _, commands in packed for c in commands]))
        return [
            p
            for p, commands in packed
            if self._tell(p, list(itertools.islice(replies, len(commands))))
        ]

    def _carry(self, commands: list[Command]) -> list[Any]:
        """Their replies, errors among them."""
        if not commands:
            return []
        with (
            translated_redis(self._where),
            self._client.pipeline(transaction=False) as pipe,
        ):
            for command in commands:
                pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipe.execute(raise_on_error=False))

    def _tell(self, passenger: Passenger, replies: list[Any]) -> bool:
        try:
            with translated_redis(self._where):
                for reply in replies:
                    if isinstance(reply, Exception):
                        raise reply
        except QueueUnavailable as error:
            passenger.miss(error)
            return False
        return passenger.hear(replies)


def _end(aboard: dict[Passenger, list[Over]], error: Exception | None) -> None:
    """Each event loop is woken once, however many wait in it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Over]] = {}
    for over in itertools.chain.from_iterable(aboard.values()):
        if isinstance(over, asyncio.Future):
            by_loop.setdefault(over.get_loop(), []).append(over)
        else:
            _end_all([over], error)
    for loop, waits in by_loop.items():
        with suppress(RuntimeError):  # it is closed: nobody waits in it any more
            loop.call_soon_threadsafe(_end_all, waits, error)


def _end_all(waits: list[Over], error: Exception | None) -> None:
    for over in waits:
        if over.done():  # cancelled: who waited left
            continue
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)
