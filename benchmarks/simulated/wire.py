"""As much of HTTP/1.1 as a simulated engine needs, for a quarter of a library server's time.

Used by server.py alone. A fleet's engines share two cores with all that is measured: aiohttp's
server took 0.27 ms of CPU for an empty request at 1,000 a second, this takes 0.07. It knows bodies
with a length, one request after the other on a connection, replies with a length and chunked
streams; what it doesn't know it refuses. It stands on loopback before our own clients.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Protocol, cast

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class Application(Protocol):
    """What connections are of."""

    def serve(self, connection: Connection, path: str, body: bytes) -> None:
        """Answer, now or later."""

    def joined(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """One client's. The next request is looked at once this one has its whole reply."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._is_busy = self._is_streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are in no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._application.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._application.lost(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._look()

    def reply(self, status: int, body: bytes = b"", content_type: str = JSON) -> None:
        """The whole of it."""
        length = f"Content-Length: {len(body)}"
        self._write(_head(status, content_type, length) + body)
        self._be_free()

    def stream(self, data: bytes, *, is_last: bool = False) -> None:
        """A part of a reply of events; the first one goes together with the head."""
        head = b"" if self._is_streaming else _STREAM_HEAD
        end = _LAST_CHUNK if is_last else b""
        self._write(b"%b%x\r\n%b\r\n%b" % (head, len(data), data, end))
        self._is_streaming = not is_last
        if is_last:
            self._be_free()

    def cut(self) -> None:
        """As a process that dies cuts it."""
        if self._transport is not None:
            self._transport.abort()

    def _look(self) -> None:
        """For a whole request."""
        end = self._received.find(_HEAD_END)
        if self._is_busy or end < 0:
            return
        head = bytes(self._received[:end])
        start = end + len(_HEAD_END)
        if _CHUNKED.search(head):
            self._received.clear()
            self.reply(411)
            return
        length = _LENGTH.search(head)
        end = start + (int(length[1]) if length else 0)
        if len(self._received) < end:
            return
        body = bytes(self._received[start:end])
        del self._received[:end]
        self._is_busy = True
        path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
        self._application.serve(self, path, body)

    def _be_free(self) -> None:
        self._is_busy = False
        if self._received:
            self._look()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _head(status: int, content_type: str, framing: str) -> bytes:
    phrase = HTTPStatus(status).phrase
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {content_type}\r\n{framing}\r\n\r\n"
    return head.encode()


_STREAM_HEAD = _head(200, EVENTS, "Transfer-Encoding: chunked")
