"""Who of a batch is in the engine, who still may go in, and how one prompt has it to itself.

Taken by answering for each turn, closed by rounds. The engine's `slot` is the one limit on requests
in flight, over all batches, and lets in whoever came first. It is a queue in strict order, so two
batches that each want every slot can't wait for one another: all waits of the one are ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any

from dflash_workers.contract.errors import Draining


class Seats:
    """One batch's. Used inside one event loop."""

    def __init__(self, *, is_alone: bool = False) -> None:
        self.taken: set[str] = set()  # keys of the prompts that are in the engine
        self._is_alone = is_alone  # its batch has every slot already
        self._is_closed = False
        self._waiting: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def take(self, prompt_key: str, slot: asyncio.Semaphore) -> AsyncIterator[None]:
        """Be in the engine inside the block. Raises Draining once nobody may go in any more."""
        entrance: AbstractAsyncContextManager[None] = nullcontext() if self._is_alone else slot
        async with AsyncExitStack() as stack:
            self._check_open()
            with self._waits():
                await stack.enter_async_context(entrance)
            self._check_open()
            self.taken.add(prompt_key)
            stack.callback(self.taken.discard, prompt_key)
            yield

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


@asynccontextmanager
async def every_slot(slot: asyncio.Semaphore, num_slots: int) -> AsyncIterator[None]:
    """Have the engine to oneself inside the block: after all that runs, before all that comes."""
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(slot) for _ in range(num_slots)))
        yield
