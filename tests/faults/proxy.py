"""A small TCP proxy between a worker and what it depends on, which can do what networks do.

Stands before Redis and the engine; http_proxy.py, which builds on it, stands before S3. Runs in a
thread of its own; everything public may be called from the test's thread and holds when it returns.
What passed is counted, so that a test can tell whether its fault was met at all.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from enum import Enum
from typing import TypeVar

Result = TypeVar("Result")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_RST = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: closing sends a reset
_GONE = (ConnectionError, asyncio.IncompleteReadError, OSError)


class Mode(Enum):
    """What becomes of a connection."""

    PASS = "pass"
    REFUSE = "refuse"  # nobody listens; open connections are reset
    RESET = "reset"  # open connections are reset, and so is each new one
    FREEZE = "freeze"  # connections stand, nothing moves
    LOSE_REPLY = "lose reply"  # what is asked gets there; what is answered does not, then a reset


class Proxy:
    """Use in a `with`. Mode PASS until told otherwise."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.num_connections = 0
        self.num_met = 0  # connections or replies that a mode other than PASS was felt by
        self.delay_s = 0.0  # before each piece that passes, either way
        self._upstream = upstream
        self.mode = Mode.PASS
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.thawed = self._do(_make_event())
        self._port = 0
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """On 127.0.0.1; stays the same for life."""
        return self._port

    def set(self, mode: Mode) -> None:
        """Change what happens, to open connections as well."""
        self._do(self._set(mode))

    def cut(self) -> None:
        """Reset every open connection, once; new ones pass."""
        self._do(self._reset_all())

    async def _set(self, mode: Mode) -> None:
        self.mode = mode
        if mode is Mode.FREEZE:
            self.thawed.clear()
        else:
            self.thawed.set()
        if mode in (Mode.REFUSE, Mode.RESET):
            await self._reset_all()
        if mode is Mode.REFUSE:
            await self._stop_listening()
        else:
            await self._listen()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _close(self) -> None:
        await self._stop_listening()
        self.thawed.set()
        await self._reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reset_all(self) -> None:
        for writer in list(self._writers):
            reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        try:
            if self.mode is Mode.RESET:
                self.num_met += 1
                reset(writer)
                return
            await self.thawed.wait()
            there = await asyncio.open_connection(*self._upstream)
            self._writers.add(there[1])
            try:
                await self._serve((reader, writer), there)
            finally:
                self._writers.discard(there[1])
                there[1].close()
        except _GONE:
            reset(writer)  # nobody behind us, or one side has left
        except asyncio.CancelledError:
            pass  # the proxy closes
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, here: Streams, there: Streams) -> None:
        """One connection, until either side ends it."""
        pumps = [
            asyncio.create_task(self._pump(here[0], there[1], is_reply=False)),
            asyncio.create_task(self._pump(there[0], here[1], is_reply=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(*_GONE):
            while piece := await reader.read(65536):
                if not self.thawed.is_set():
                    self.num_met += 1
                await self.thawed.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if is_reply and self.mode is Mode.LOSE_REPLY:
                    self.num_met += 1
                    return
                writer.write(piece)
                await writer.drain()

    def _do(self, work: Coroutine[object, object, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a crash does."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    writer.transport.abort()


async def _make_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
