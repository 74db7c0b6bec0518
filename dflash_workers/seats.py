"""Who of a batch is in the engine, who still may go in, and how one prompt has it to itself.

Taken by answering for each turn, closed by rounds. The engine's Slots are the one limit on requests
in flight, over all batches. They let in whoever came first, but for the prompts of a batch that a
dead worker left: those wait behind nobody who came to a living one, or a full engine would keep
them for as long as all that waits there takes. Two batches that each want every slot can't wait for
one another: they stand in the one ordinary line, in strict order, all waits of the one ahead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from dflash_workers.contract.errors import Draining


class Slots:
    """The engine's. Used inside one event loop."""

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._num_slots = num_slots
        self._first: deque[asyncio.Future[None]] = deque()
        self._ordinary: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Have one inside the block."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    @asynccontextmanager
    async def every(self) -> AsyncIterator[None]:
        """Have the engine to oneself inside the block: after all that runs, before all that comes
        to the ordinary line.
        """
        async with AsyncExitStack() as stack:
            waits = (stack.enter_async_context(self.one()) for _ in range(self._num_slots))
            await asyncio.gather(*waits)
            yield

    async def acquire(self, *, is_first: bool = False) -> None:
        """Wait for one. `is_first`: before all in the ordinary line."""
        if self.num_free:  # nobody waits, then
            self.num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        (self._first if is_first else self._ordinary).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given one just before
                self.release()
            raise

    def release(self) -> None:
        """Hand it on, so that nobody who comes just now is before those who wait."""
        for line in (self._first, self._ordinary):
            while line:
                turn = line.popleft()
                if not turn.cancelled():
                    turn.set_result(None)
                    return
        self.num_free += 1


class Seats:
    """One batch's. Used inside one event loop."""

    def __init__(self, *, is_alone: bool = False, is_first: bool = False) -> None:
        self.taken: set[str] = set()  # keys of the prompts that are in the engine
        self._is_alone = is_alone  # its batch has every slot already
        self._is_first = is_first  # before others' prompts
        self._is_closed = False
        self._waiting: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def take(self, prompt_key: str, slots: Slots) -> AsyncIterator[None]:
        """Be in the engine inside the block. Raises Draining once nobody may go in any more."""
        self._check_open()
        if not self._is_alone:
            with self._waits():
                await slots.acquire(is_first=self._is_first)
        try:
            self._check_open()
            self.taken.add(prompt_key)
            yield
        finally:
            self.taken.discard(prompt_key)
            if not self._is_alone:
                slots.release()

    def close(self) -> None:
        """Let nobody in from now on. Who waits is told at once, who is in may end."""
        self._is_closed = True
        for task in self._waiting:
            task.cancel()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Around the wait of a task that `close` may end."""
        task = asyncio.current_task()
        assert task
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            self._waiting.discard(task)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Draining("nothing new is started: this prompt was not")
