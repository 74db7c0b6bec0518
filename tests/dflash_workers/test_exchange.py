"""A question and its reply: read as the standard library reads it, however it is cut."""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dflash_workers import exchange
from dflash_workers.exchange import Lane, NotConnected, NotResolved, Said, takes

_END = b"\r\n\r\n"

REPLIES = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b: c\r\n\r\nhello world",
    "empty": b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
    "no body": b"HTTP/1.1 204 No Content\r\nServer: s\r\n\r\n",
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
        b"5\r\nhello\r\n10;x=y\r\n\r\n0123456789abcd\r\n0\r\n\r\n"
    ),
    "chunks and trailers": (
        b"HTTP/1.1 429 Slow\r\nTransfer-Encoding: chunked\r\nRetry-After: 7\r\n\r\n"
        b"3\r\nabc\r\n0\r\nX-Sum: 1\r\nX-B: 2\r\n\r\n"
    ),
    "interim first": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    ),
    "closes": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    "until it closes": b"HTTP/1.1 200 OK\r\nServer: old\r\n\r\nhello \r\n\r\n world",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
}

NO_REPLIES = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "no header": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "length of letters": b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "chunk of letters": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "negative chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nab\r\n",
    "chunk too long": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcde\r\n",
}


class _Socket:
    """What http.client wants of one."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._sent)


def as_the_standard_library_reads(sent: bytes) -> tuple[int, bytes]:
    reply = http.client.HTTPResponse(_Socket(sent), method="POST")  # type: ignore[arg-type]
    reply.begin()
    return reply.status, reply.read()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://engine", True),
        ("http://[::1]:30000/prefix", True),
        ("https://engine", False),
        ("http://user:word@engine", False),
        ("http://engine:99999", False),
        ("http://engine/?key=1", False),
        ("http://ängine", False),
        ("http://engine/a b\r\nX: y", False),
        ("http://", False),
        ("engine:30000", False),
    ],
)
def test_it_takes_plain_http_alone(url: str, expected: bool) -> None:
    assert takes(url) is expected


Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Server:
    """One that behaves as told, and counts the connections made to it."""

    def __init__(self, make: Callable[[Server], Behaviour]) -> None:
        self._behave = make(self)
        self.num_connections = 0
        self.asked: list[bytes] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self.tasks.append(task)
        self.num_connections += 1
        try:
            await self._behave(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def question(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(_END)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.asked.append(head + await reader.readexactly(length))
        return self.asked[-1]


@asynccontextmanager
async def serving(make: Callable[[Server], Behaviour]) -> AsyncIterator[tuple[Server, Lane]]:
    server = Server(make)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    lane = Lane(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/at", 5.0)
    try:
        yield server, lane
    finally:
        lane.close()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        listener.close()
        await listener.wait_closed()


def replying(*replies: bytes, step: int = 1 << 20) -> Callable[[Server], Behaviour]:
    """The same replies on each connection, one for each question, in pieces; then it closes."""

    def make(server: Server) -> Behaviour:
        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for reply in replies:
                await server.question(reader)
                for start in range(0, len(reply), step):
                    writer.write(reply[start : start + step])
                    await asyncio.sleep(0)

        return behave

    return make


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_is_read_as_the_standard_library_reads_it_however_it_is_cut(
    name: str, step: int
) -> None:
    sent = REPLIES[name]

    async def work() -> Said:
        async with serving(replying(sent, step=step)) as (_, lane):
            return await lane.post("/generate", b"{}")

    said = asyncio.run(work())

    oracle = sent.split(_END, sent.count(b"HTTP/1.1 1"))[-1]  # which knows of 100 alone
    assert (said.status, said.body) == as_the_standard_library_reads(oracle)


@pytest.mark.parametrize("name", NO_REPLIES)
def test_what_is_no_reply_is_refused(name: str) -> None:
    async def work() -> None:
        async with serving(replying(NO_REPLIES[name])) as (_, lane):
            await lane.post("/generate", b"{}")

    with pytest.raises(ConnectionAbortedError, match="no HTTP reply"):
        asyncio.run(work())


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def test_a_connection_is_asked_again_and_again() -> None:
    async def work() -> tuple[Server, list[Said]]:
        async with serving(replying(*[REPLIES["length"], REPLIES["chunks"]] * 2)) as (server, lane):
            return server, [await lane.post("/generate", b'{"a": 1}') for _ in range(4)]

    server, said = asyncio.run(work())

    assert [one.body for one in said[:2]] == [b"hello world", b"hello\r\n0123456789abcd"]
    assert server.num_connections == 1
    assert server.asked[0].startswith(b"POST /at/generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert server.asked[0].endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize("name", ["closes", "until it closes", "old"])
def test_a_connection_that_closes_is_not_asked_again(name: str) -> None:
    async def work() -> tuple[int, list[int]]:
        async with serving(replying(REPLIES[name])) as (server, lane):
            statuses = [(await lane.post("/generate", b"{}")).status for _ in range(3)]
            return server.num_connections, statuses

    assert asyncio.run(work()) == (3, [200] * 3)


def test_a_connection_that_was_closed_while_idle_is_not_asked_again() -> None:
    async def work() -> tuple[int, int]:
        async with serving(replying(REPLIES["length"])) as (server, lane):
            await lane.post("/generate", b"{}")
            while lane._idle:  # until its end has come
                await asyncio.sleep(0.01)
            return (await lane.post("/generate", b"{}")).status, server.num_connections

    assert asyncio.run(work()) == (200, 2)


def test_a_connection_that_was_idle_for_long_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "_IDLE_S", 0.5)

    async def work() -> list[int]:
        seen: list[int] = []
        async with serving(replying(*[REPLIES["length"]] * 9)) as (server, lane):
            for pause_s in (0.0, 0.0, 0.6):
                await asyncio.sleep(pause_s)
                await asyncio.gather(*(lane.post("/generate", b"{}") for _ in range(2)))
                seen.append(server.num_connections)
        return seen

    assert asyncio.run(work()) == [2, 2, 4]


def test_a_reply_that_nobody_asked_for_is_nobodys() -> None:
    twice = REPLIES["length"] + REPLIES["closes"]

    async def work() -> tuple[list[bytes], int]:
        async with serving(replying(twice, twice)) as (server, lane):
            bodies = [(await lane.post("/generate", b"{}")).body for _ in range(2)]
            return bodies, server.num_connections

    assert asyncio.run(work()) == ([b"hello world"] * 2, 2)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", ConnectionResetError),
        (REPLIES["length"][:-1], ConnectionResetError),
        (REPLIES["chunks"][:-1], ConnectionResetError),
    ],
)
def test_what_breaks_off_may_have_been_asked(sent: bytes, error: type[ConnectionError]) -> None:
    async def work() -> None:
        async with serving(replying(sent)) as (_, lane):
            await lane.post("/generate", b"{}")

    with pytest.raises(error) as caught:
        asyncio.run(work())
    assert not isinstance(caught.value, NotConnected)


@pytest.mark.parametrize(
    ("url", "error"),
    [("http://127.0.0.1:1", NotConnected), ("http://no.such.host.invalid", NotResolved)],
)
def test_where_nobody_listens_nothing_arrived(url: str, error: type[NotConnected]) -> None:
    with pytest.raises(error):
        asyncio.run(Lane(url, 5.0).post("/generate", b"{}"))


def test_whoever_is_cancelled_hangs_up() -> None:
    async def work() -> list[bytes]:
        heard: list[bytes] = []

        def make(server: Server) -> Behaviour:
            async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await server.question(reader)
                heard.append(await reader.read())  # until the other side closes

            return behave

        async with serving(make) as (server, lane):
            asking = asyncio.create_task(lane.post("/generate", b"{}"))
            while not server.asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            async with asyncio.timeout(10):
                while not heard:
                    await asyncio.sleep(0.01)
            return heard

    assert asyncio.run(work()) == [b""]


def test_closing_breaks_off_what_is_running() -> None:
    async def work() -> None:
        async with serving(lambda _: silent) as (server, lane):
            asking = asyncio.create_task(lane.post("/generate", b"{}"))
            while not server.num_connections:
                await asyncio.sleep(0.01)
            lane.close()
            async with asyncio.timeout(10):
                await asking

    with pytest.raises(ConnectionResetError):
        asyncio.run(work())
