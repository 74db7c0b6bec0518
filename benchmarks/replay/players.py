"""Many workers out of one process: each takes the tape's steps in its own names, at a given pace.

Started by crowd.py, a process or two for all workers. Replies are read and thrown away: a step is
sent when it is due, whatever became of the one before, so that a slow Redis is seen as such and
slows nothing down. Who falls behind its own times says so (`Counts.lag_s`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from typing import cast
from urllib.parse import unquote, urlsplit

from benchmarks.replay.tape import Held, Step, Tape

TICK_S = 0.002  # what is due within the same tick goes one after the other
NUM_COUNTS = 6  # ready, pieces, commands, ended prompts, bytes, by how many seconds it is late
_MOST_S = 0.1  # without letting connections be read and written


@dataclass(frozen=True, slots=True)
class Part:
    """What one process plays."""

    tape: Tape
    redis_url: str
    numbers: range  # of the workers
    prompts_per_s: float  # of each


@dataclass(slots=True)
class _Drain(asyncio.Protocol):
    """Reads, and lets go."""

    transport: asyncio.Transport | None = None
    greeted: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self.greeted.set()


class Player:
    """One worker."""

    def __init__(self, part: Part, number: int, connections: list[_Drain]) -> None:
        self._tape, self._connections = part.tape, connections
        self._name = b"%04d" % number
        self._stretch = part.tape.prompts_per_s / part.prompts_per_s
        self._held: dict[bytes, Held] = {}
        self._draw = random.Random(number)

    def streams(self, now_s: float) -> list[Iterator[tuple[float, Step | None]]]:
        """Steps with the times they are due at: the work's, the clock's, and renewals (None)."""
        return [self._work(now_s), self._clock(now_s), self._renewals(now_s)]

    def take(self, step: Step | None) -> tuple[int, int, int, int]:
        """Send it; how many pieces, commands, ended prompts and bytes that were."""
        if step is None:
            num_held, renewal = len(self._held), self._tape.renewal
            for held in self._held.values():
                self._send(renewal.connection, self._tape.renewal_of(held, self._name))
            return num_held, num_held, 0, num_held * len(renewal.body)
        if step.claimed:
            self._held[step.claimed.batch] = step.claimed
        self._held.pop(step.cleared, None)
        self._send(step.connection, step.as_worker(self._name))
        return 1, step.num_commands, step.num_prompts, len(step.body)

    def _send(self, connection: int, body: bytes) -> None:
        transport = self._connections[connection].transport
        assert transport
        transport.write(body)

    def _work(self, now_s: float) -> Iterator[tuple[float, Step]]:
        """From a place of its own on, over and over; what is held there is claimed first."""
        work = self._tape.work
        first = self._draw.randrange(len(work))
        for step in self._tape.held_at(first):
            yield now_s, step
        began_s = now_s - work[first].at_s * self._stretch
        for turn in itertools.count():
            for step in work[first if turn == 0 else 0 :]:
                yield began_s + (turn * self._tape.length_s + step.at_s) * self._stretch, step

    def _clock(self, now_s: float) -> Iterator[tuple[float, Step]]:
        began_s = now_s - self._draw.uniform(0, self._tape.length_s)
        for turn in itertools.count():
            for step in self._tape.clock:
                due_s = began_s + turn * self._tape.length_s + step.at_s
                if due_s >= now_s:
                    yield due_s, step

    def _renewals(self, now_s: float) -> Iterator[tuple[float, None]]:
        first_s = now_s + self._draw.uniform(0, self._tape.renew_every_s)
        for turn in itertools.count():
            yield first_s + turn * self._tape.renew_every_s, None


_Due = tuple[float, int, Step | None, Player, Iterator[tuple[float, Step | None]]]


def play(part: Part, counts: SynchronizedArray[float], over: Event) -> None:
    """The process: until told that it is over."""
    import uvloop  # Linux alone has it

    uvloop.run(_play(part, counts, over))


async def _play(part: Part, counts: SynchronizedArray[float], over: Event) -> None:
    players = [Player(part, number, await _connect(part)) for number in part.numbers]
    queue: list[_Due] = []
    now_s, order = time.monotonic(), itertools.count()
    for player in players:
        for stream in player.streams(now_s):
            at_s, step = next(stream)
            queue.append((at_s, next(order), step, player, stream))
    heapq.heapify(queue)
    sums = [1.0] + [0.0] * (NUM_COUNTS - 1)  # as the counts
    while not over.is_set():
        sums[-1] = _take_due(queue, sums)
        counts[:] = sums
        await asyncio.sleep(TICK_S)


def _take_due(queue: list[_Due], sums: list[float]) -> float:
    """Everything that is due, for a tick at most; by how much the latest came too late."""
    began_s = now_s = time.monotonic()
    lag_s = 0.0
    while queue[0][0] <= now_s < began_s + _MOST_S:
        at_s, number, step, player, stream = queue[0]
        lag_s = max(lag_s, now_s - at_s)
        for place, count in enumerate(player.take(step), start=1):
            sums[place] += count
        next_s, next_step = next(stream)
        heapq.heapreplace(queue, (next_s, number, next_step, player, stream))
        now_s = time.monotonic()
    return lag_s


async def _connect(part: Part) -> list[_Drain]:
    """One worker's connections, logged in."""
    return await asyncio.gather(*(_open(part.redis_url) for _ in range(part.tape.num_connections)))


async def _open(redis_url: str) -> _Drain:
    where = urlsplit(redis_url)
    _, drain = await asyncio.get_running_loop().create_connection(
        _Drain, where.hostname or "127.0.0.1", where.port or 6379
    )
    if where.password:
        password = unquote(where.password).encode()
        assert drain.transport
        drain.transport.write(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(password), password))
        await drain.greeted.wait()
    return drain
