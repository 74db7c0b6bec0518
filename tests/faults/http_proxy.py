"""A proxy before S3 that knows one request from the next and may answer in the server's place.

Builds on proxy.py, whose modes hold here as well, for whole requests and replies. A Rule picks out
requests by method and path; every request is kept as its client sent it, so that a test can look
at headers, too.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from tests.faults.proxy import Mode, Proxy, Streams, reset


@dataclass
class Rule:
    """What becomes of the next requests that match. The first rule that matches and has some left
    counts."""

    method: str  # "PUT"; "": any
    path: str  # a regular expression, found anywhere in path and query
    status: int = 0  # answered in the server's place; 0: see `lose_reply`
    code: str = ""  # of S3's error
    lose_reply: bool = False  # done by the server, yet the connection ends without its answer
    num_left: int = 1  # requests; -1: all
    num_met: int = 0


@dataclass(frozen=True)
class Request:
    """One that came to the proxy, as its client sent it."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body_bytes: int


@dataclass(frozen=True)
class _Message:
    """Head and body of a request or of a reply, as they came."""

    head: bytes
    body: bytes

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode().split(" ")

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}


class HttpProxy(Proxy):
    """Understands requests with a body of known length or in chunks; keeps connections alive."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(upstream)
        self.requests: list[Request] = []
        self.rules: list[Rule] = []

    def __enter__(self) -> HttpProxy:
        super().__enter__()
        return self

    async def _serve(self, here: Streams, there: Streams) -> None:
        while True:
            request = await _read_request(*here)
            if request is None:
                return
            await self.thawed.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            rule = self._rule_for(request)
            if rule and rule.status:
                here[1].write(_answer(rule))
            else:
                reply = await _ask(request, there)
                await self.thawed.wait()
                if self.mode is Mode.LOSE_REPLY or (rule and rule.lose_reply):
                    self.num_met += 1
                    reset(here[1])
                    return
                here[1].write(reply.head + reply.body)
            await here[1].drain()

    def _rule_for(self, message: _Message) -> Rule | None:
        method, path, _ = message.first_line
        self.requests.append(Request(method, path, message.headers, len(message.body)))
        for rule in self.rules:
            if rule.num_left and rule.method in ("", method) and re.search(rule.path, path):
                rule.num_left -= rule.num_left > 0
                rule.num_met += 1
                self.num_met += 1
                return rule
        return None


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> _Message | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    message = _Message(head, b"")
    if message.headers.get("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)  # no signature covers this header
    return _Message(head, await _read_body(message.headers, reader))


async def _ask(request: _Message, there: Streams) -> _Message:
    there[1].write(request.head + request.body)
    await there[1].drain()
    head = await there[0].readuntil(b"\r\n\r\n")
    while head.split(b" ", 2)[1].startswith(b"1"):
        head = await there[0].readuntil(b"\r\n\r\n")
    reply = _Message(head, b"")
    if request.first_line[0] == "HEAD" or reply.first_line[1] in ("204", "304"):
        return reply
    return _Message(head, await _read_body(reply.headers, there[0]))


async def _read_body(headers: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while True:
        size = await reader.readuntil(b"\r\n")
        body += size + await reader.readexactly(int(size.split(b";")[0], 16) + 2)
        if not int(size.split(b";")[0], 16):
            return body


def _answer(rule: Rule) -> bytes:
    body = f"<Error><Code>{rule.code}</Code><Message>by the proxy</Message></Error>".encode()
    if rule.status < 400:
        body = b""
    head = f"HTTP/1.1 {rule.status} X\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
