"""What the turns of all batches have for Redis, and what they ask it: one round trip for them all.

Called by journal. One thread carries, over a connection of its own, whatever came together while
the trip before was under way. It speaks through redis-py's Connection: a Pipeline takes twice the
CPU, and there is about a trip a request. Nobody is told that something is written before Redis has
said so. A connection that fails fails all who were on that trip alike, and all who wait by then; a
reply that is an error is one batch's alone, and what the others wrote stands. Redis runs one trip's
commands in their order, but other clients' between them: what must happen at once is one command.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import redis

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.queues import translated_redis

Command = tuple[str | int | bytes, ...]
Over = Future[None] | asyncio.Future[None]  # for a thread that waits, or in an event loop

_TOGETHER = 16  # passengers on one trip at most, as each may bring hundreds of KB
_IDLE_S = 10.0  # after which the thread ends


class Passenger(Protocol):
    """Who has something for Redis. Called from the carrying thread alone, by turns."""

    def commands(self) -> list[Command]:
        """What it has now, or as much of it as Redis does without keeping others waiting. They may
        be run twice.
        """

    def hear(self, replies: Sequence[Any]) -> bool:
        """The commands' replies, none of them an error; whether it has more that was there."""

    def miss(self, error: QueueUnavailable) -> None:
        """The commands may have been run or not: Redis is away, or can't do them now."""


class RoundTrips:
    """Over one client. Safe to share between threads; its own starts with the first trip."""

    def __init__(self, client: redis.Redis, where: str) -> None:
        self._client = client
        self._where = where
        self._connection: redis.Connection | None = None
        self._waiting: dict[Passenger, list[Over]] = {}
        self._is_under_way = False
        self._has_thread = False
        self._starts: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of these but the connection

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
            if not self._has_thread:  # it may fail; only then is anything under way
                threading.Thread(target=self._carry_on, name="round-trips", daemon=True).start()
            self._has_thread = self._is_under_way = True
            self._starts.put(None)

    def _carry_on(self) -> None:
        while True:
            try:
                self._starts.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._has_thread = self._is_under_way
                if not self._has_thread:
                    return
            else:
                self._travel()

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
        """Who is on the next trip; nobody, and the thread waits."""
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
        with translated_redis(self._where):
            connection = self._connected()
            return list(
                connection.retry.call_with_retry(
                    lambda: _carry_briefly(connection, commands),
                    lambda _error: connection.disconnect(),  # type: ignore[no-untyped-call]
                )
            )

    def _connected(self) -> redis.Connection:
        connection, self._connection = self._connection, None
        pool = self._client.connection_pool
        if connection is not None and not connection.is_connected:
            pool.release(connection)  # from here on it may be somebody else's
            connection = None
        self._connection = connection or pool.get_connection()
        return self._connection

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


def _carry_briefly(connection: redis.Connection, commands: list[Command]) -> list[Any]:
    """Scripts by their digests; all of it once more, in full, where Redis knows one no more."""
    replies = _exchange(connection, [_brief(command) for command in commands])
    if any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies):
        return _exchange(connection, commands)
    return replies


def _brief(command: Command) -> Command:
    return ("EVALSHA", _digest(command[1]), *command[2:]) if command[0] == "EVAL" else command


@functools.cache
def _digest(script: str) -> str:
    """By which Redis knows it, once it has run it."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _exchange(connection: redis.Connection, commands: list[Command]) -> list[Any]:
    packed = connection.pack_commands(commands)  # type: ignore[no-untyped-call]
    connection.send_packed_command(packed)  # type: ignore[no-untyped-call]
    return [_reply(connection) for _ in commands]


def _reply(connection: redis.Connection) -> Any:
    """The next; an error that is one command's alone is a reply as well."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


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
