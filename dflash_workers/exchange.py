"""One question and its reply over HTTP/1.1: the road that nearly every answer of an engine takes.

Used by wire for what is asked over plain HTTP and replied to as a whole; all else (TLS, streams,
probes) goes through aiohttp. It is here for its cost alone: a request through aiohttp takes a fifth
of all CPU that a worker spends on it, and four times what this takes. httptools reads the replies.
A connection has one question at a time. What can't be read, or was cut off, breaks the connection
and is a ConnectionError, which wire takes for what it is: the question may have arrived.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

# A server closes what is idle, SGLang after 5 s, and what is asked in that moment is lost.
_IDLE_S = 1.0
_BODILESS = (204, 304)


class NotConnected(ConnectionError):
    """Nobody was reached: the question can't have arrived."""


class NotResolved(NotConnected):
    """The name has no address."""


class NotInTime(NotConnected, TimeoutError):
    """Connecting took too long."""


@dataclass(frozen=True, slots=True)
class Said:
    """A whole reply."""

    status: int
    headers: dict[bytes, bytes]  # names in small letters
    body: bytes


class Lane:
    """Connections to one server. Made and used inside one event loop."""

    def __init__(self, url: str, connect_s: float) -> None:
        """`url`: one that `takes` has said yes to."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = parts.path
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def post(self, path: str, body: bytes) -> Said:
        """The reply to it, whatever its status. Raises NotConnected, or another ConnectionError.

        No time limit but that of connecting. Whoever is cancelled breaks its connection off.
        """
        connection = self._take_idle() or await self._connect()
        length = f"Content-Length: {len(body)}\r\n\r\n"
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{length}"
        try:
            said = await connection.ask(head.encode() + body)
        except BaseException:
            connection.break_off()
            raise
        if connection.keeps_open:
            connection.replied_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.break_off()
        return said

    def close(self) -> None:
        """Break off what is running."""
        for connection in tuple(self._open):
            connection.break_off()

    def forget(self, connection: _Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> _Connection | None:
        """The one that was asked last, unless that was too long ago, and so for all the others."""
        if not self._idle:
            return None
        latest = self._idle.pop()
        if time.monotonic() - latest.replied_s < _IDLE_S:
            return latest
        for connection in (latest, *self._idle):
            connection.break_off()
        self._idle.clear()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port
                )
        except TimeoutError as error:
            raise NotInTime(f"not connected within {self._connect_s:g} s") from error
        except socket.gaierror as error:
            raise NotResolved(str(error)) from error
        except OSError as error:
            raise NotConnected(str(error)) from error
        self._open.add(connection)
        return connection


def takes(url: str) -> bool:
    """Whether a Lane reaches this URL: plain HTTP, no password, nothing that wants encoding."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_plain = parts.scheme == "http" and bool(parts.hostname) and port != 0 and "@" not in url
    return is_plain and not (parts.query or parts.fragment) and url.isascii() and url.isprintable()


class _Connection(asyncio.Protocol):
    """One, with at most one question on it. The methods `on_...` are httptools' to call."""

    def __init__(self, lane: Lane) -> None:
        self.replied_s = 0.0  # when it was done with its last question
        self._lane = lane
        self._parser = httptools.HttpResponseParser(self)
        self._said: asyncio.Future[Said] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []  # of the body
        self._is_in_body = self._may_stay = False

    @property
    def keeps_open(self) -> bool:
        """Whether it may be asked again."""
        return self._may_stay and not self._transport.is_closing()

    def ask(self, request: bytes) -> asyncio.Future[Said]:
        """The reply, once it is whole."""
        self._said = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._said

    def break_off(self) -> None:
        """Safe to call twice."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.break_off()
            self._fail(ConnectionAbortedError(f"what came is no HTTP reply: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lane.forget(self)
        is_length_told = self._headers.keys() & {b"content-length", b"transfer-encoding"}
        if self._is_in_body and not is_length_told and error is None:
            self._reply()
        cut = f"the server closed the connection: {error or 'no reply'}"
        self._fail(ConnectionResetError(cut))

    def on_message_begin(self) -> None:
        self._headers, self._parts = {}, []
        if not self._is_asked:  # it speaks without being asked
            self.break_off()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_in_body = status >= 200 and status not in _BODILESS

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # else an interim one: the reply follows
            self._may_stay = self._parser.should_keep_alive()
            self._reply()

    @property
    def _is_asked(self) -> bool:
        return self._said is not None and not self._said.done()

    def _reply(self) -> None:
        self._is_in_body = False
        if self._said is not None and self._is_asked:
            status = self._parser.get_status_code()
            self._said.set_result(Said(status, self._headers, b"".join(self._parts)))

    def _fail(self, error: ConnectionError) -> None:
        if self._said is not None and self._is_asked:
            self._said.set_exception(error)
