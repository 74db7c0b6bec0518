"""What one real worker asks of Redis and of S3: pieces of whole commands, requests, with times.

Two listeners between the worker and its servers pass every byte on unchanged and keep what the
worker sent. Read afterwards by tape.py and objects.py. A piece holds what arrived
together, since a pipeline costs Redis less than its commands one by one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import orjson

_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Piece:
    """Redis commands that were sent in one go over one connection."""

    at_s: float  # since the recording's start
    connection: int
    body: bytes
    commands: list[list[bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to S3."""

    at_s: float  # since the recording's start
    method: str
    path: str
    body_bytes: int


Kept = TypeVar("Kept", Piece, Asked)


class Parser(ABC, Generic[Kept]):
    """Of what one connection's client sends."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        self.buffer = bytearray()

    def feed(self, data: bytes, at_s: float) -> list[Kept]:
        """What is whole by now."""
        self.buffer += data
        return self.take(at_s)

    @abstractmethod
    def take(self, at_s: float) -> list[Kept]:
        """Out of the buffer."""


class RedisParser(Parser[Piece]):
    """RESP, as clients speak it: arrays of bulk strings."""

    def take(self, at_s: float) -> list[Piece]:
        commands, end = [], 0
        while read := _read_command(self.buffer, end):
            command, end = read
            commands.append(command)
        if not commands:
            return []
        body = bytes(self.buffer[:end])
        del self.buffer[:end]
        return [Piece(at_s, self.connection, body, commands)]


class HttpParser(Parser[Asked]):
    """HTTP/1.1 whose bodies have a length."""

    def __init__(self, connection: int) -> None:
        super().__init__(connection)
        self._body_left = 0

    def take(self, at_s: float) -> list[Asked]:
        asked: list[Asked] = []
        while self.buffer:
            dropped = min(self._body_left, len(self.buffer))
            del self.buffer[:dropped]
            self._body_left -= dropped
            head, end, _ = self.buffer.partition(b"\r\n\r\n")
            if self._body_left or not end:
                break
            del self.buffer[: len(head) + len(end)]
            request = _read_head(head, at_s)
            self._body_left = request.body_bytes
            asked.append(request)
        return asked


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a worker asked for, until `to_s`."""

    pieces: list[Piece]
    requests: list[Asked]
    to_s: float
    waiting_bytes: float  # that Redis keeps of a batch that waits
    held_bytes: float  # and in the journal of one that is worked on, in the mean

    def keep(self, path: Path) -> None:
        """As JSON, without what the worker logged in with."""
        told = {
            "to_s": self.to_s,
            "waiting_bytes": self.waiting_bytes,
            "held_bytes": self.held_bytes,
            "pieces": [
                (piece.at_s, piece.connection, piece.body.decode("latin-1"))
                for piece in self.pieces
                if not _tells_secrets(piece)
            ],
            "requests": [
                (asked.at_s, asked.method, asked.path, asked.body_bytes) for asked in self.requests
            ],
        }
        path.write_bytes(orjson.dumps(told))

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """What `keep` wrote."""
        told = orjson.loads(path.read_bytes())
        pieces = [
            piece
            for at_s, connection, body in told["pieces"]
            for piece in RedisParser(connection).feed(body.encode("latin-1"), at_s)
        ]
        requests = [Asked(*asked) for asked in told["requests"]]
        return cls(pieces, requests, told["to_s"], told["waiting_bytes"], told["held_bytes"])


def _tells_secrets(piece: Piece) -> bool:
    return any(command[0] in (b"HELLO", b"AUTH") for command in piece.commands)


class Recording(Generic[Kept]):
    """One listener. Use in a `with`; `kept` is complete once that has ended."""

    def __init__(
        self, upstream: tuple[str, int], parser: type[Parser[Kept]], zero_s: float
    ) -> None:
        self.kept: list[Kept] = []
        self.port = 0
        self._upstream, self._zero_s = upstream, zero_s
        self._parser: type[Parser[Kept]] = parser
        self._num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="recording", daemon=True
        )
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Recording[Kept]:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        assert self._server
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        parser = self._parser(self._num_connections)
        self._num_connections += 1
        there_reader, there_writer = await asyncio.open_connection(*self._upstream)
        try:
            await asyncio.gather(
                self._pass(reader, there_writer, parser), self._pass(there_reader, writer, None)
            )
        except (ConnectionError, asyncio.CancelledError):
            pass  # either side has left, or the recording ends
        finally:
            self._tasks.discard(task)
            there_writer.close()
            writer.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        parser: Parser[Kept] | None,
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if parser:
                self.kept += parser.feed(data, time.monotonic() - self._zero_s)
            writer.write(data)
            await writer.drain()
        writer.close()


def _read_command(buffer: bytearray, at: int) -> tuple[list[bytes], int] | None:
    """One from this place on, and where it ends; None where it isn't whole yet."""
    if (line := _read_number(buffer, at)) is None:
        return None
    num_args, at = line
    args = []
    for _ in range(num_args):
        if (line := _read_number(buffer, at)) is None:
            return None
        length, start = line
        at = start + length + 2
        if at > len(buffer):
            return None
        args.append(bytes(buffer[start : start + length]))
    return args, at


def _read_number(buffer: bytearray, at: int) -> tuple[int, int] | None:
    """Of a line such as "*3" or "$12", and where the next begins."""
    end = buffer.find(b"\r\n", at)
    return None if end < 0 else (int(buffer[at + 1 : end]), end + 2)


def _read_head(head: bytes | bytearray, at_s: float) -> Asked:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _version = first.split(" ")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Asked(at_s, method, path, int(headers.get("content-length", "0")))
