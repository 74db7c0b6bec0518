"""HTTP to the engine: each status and each transport error has a fate, and events arrive whole."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    EngineUnavailable,
    FleetError,
    PromptRejected,
)
from dflash_workers.wire import Wire, is_broken, never_arrived

REJECTED = {400, 413, 422}
DENIED = {401, 403}


@asynccontextmanager
async def serving(reply: bytes | None) -> AsyncIterator[Wire]:
    """A server that sends these very bytes, in pieces, and closes; None: it stays silent."""
    answering: list[asyncio.Task[object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        answering.append(task)
        await (reader.read() if reply is None else reader.readuntil(b"\r\n\r\n"))
        size = max(7, len(reply or b"") // 500)
        for at in range(0, len(reply or b""), size):
            writer.write((reply or b"")[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    wire = Wire(f"http://{host}:{port}/")
    try:
        yield wire
    finally:
        await wire.close()
        await asyncio.gather(*answering, return_exceptions=True)
        server.close()
        await server.wait_closed()


def run(reply: bytes, work: Callable[[Wire], Coroutine[Any, Any, Any]]) -> Any:
    async def once() -> Any:
        async with serving(reply) as wire:
            return await work(wire)

    return asyncio.run(once())


def refused(reply: bytes) -> FleetError:
    with pytest.raises(FleetError) as caught:
        run(reply, lambda wire: wire.call("/generate", 5))
    return caught.value


@pytest.mark.parametrize(
    "status", [*range(300, 304), *range(305, 309), *range(400, 432), 451, *range(500, 512), 599]
)
def test_each_status_has_a_fate(status: int) -> None:
    reply = b"HTTP/1.1 %d Because\r\nLocation: /there\r\nContent-Length: 3\r\n\r\nwhy" % status

    error = refused(reply)

    expected: type[FleetError] = EngineUnavailable
    if status in REJECTED:
        expected = PromptRejected
    if status in DENIED:
        expected = AccessDenied
    assert type(error) is expected
    assert f" {status}: /generate: " in str(error)


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("soon", 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
    ],
)
def test_a_wish_to_be_left_alone_is_read(retry_after: str, wait_s: float) -> None:
    head = f"HTTP/1.1 503 Busy\r\nRetry-After: {retry_after}\r\nContent-Length: 0\r\n\r\n"

    error = refused(head.encode())

    assert isinstance(error, EngineUnavailable)
    assert error.retry_after_s == wait_s


@pytest.mark.parametrize("from_now_s", [3600.0, -3600.0])
def test_a_wish_to_be_left_alone_may_be_a_date(from_now_s: float) -> None:
    date = email.utils.formatdate(time.time() + from_now_s, usegmt=True)
    head = f"HTTP/1.1 503 Busy\r\nRetry-After: {date}\r\nContent-Length: 0\r\n\r\n"

    error = refused(head.encode())

    assert isinstance(error, EngineUnavailable)
    assert error.retry_after_s == pytest.approx(max(from_now_s, 0), abs=60)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"220 mail.example.org ESMTP\r\n",
    ],
)
def test_a_reply_that_breaks_off_may_pass(reply: bytes) -> None:
    error = refused(reply)

    assert isinstance(error, EngineUnavailable)
    assert is_broken(error)
    assert not never_arrived(error)


def test_silence_is_broken_off_in_time() -> None:
    async def once() -> EngineUnavailable:
        async with serving(None) as wire:
            with pytest.raises(EngineUnavailable, match="no answer in time") as caught:
                await wire.call("/generate", 0.2)
            return caught.value

    started = time.monotonic()
    error = asyncio.run(once())

    assert not is_broken(error)
    assert time.monotonic() - started < 2


def test_where_nobody_listens_the_question_never_arrived() -> None:
    async def once() -> EngineUnavailable:
        wire = Wire("http://127.0.0.1:1")
        try:
            with pytest.raises(EngineUnavailable) as caught:
                await wire.call("/generate", 5)
            return caught.value
        finally:
            await wire.close()

    error = asyncio.run(once())

    assert never_arrived(error)
    assert is_broken(error)


def test_a_name_without_an_address_is_no_broken_connection() -> None:
    async def once() -> EngineUnavailable:
        wire = Wire("http://no.such.host.invalid")
        try:
            with pytest.raises(EngineUnavailable) as caught:
                await wire.call("/generate", 5)
            return caught.value
        finally:
            await wire.close()

    error = asyncio.run(once())

    assert never_arrived(error)
    assert not is_broken(error)


@pytest.mark.parametrize("url", ["nowhere", "ftp://nowhere", "http://"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    async def once() -> None:
        wire = Wire(url)
        try:
            await wire.call("/health", 5)
        finally:
            await wire.close()

    with pytest.raises(BadInput, match="is not valid"):
        asyncio.run(once())


def test_every_error_of_the_client_is_translated() -> None:
    errors = [
        found
        for found in vars(aiohttp.client_exceptions).values()
        if isinstance(found, type) and issubclass(found, Exception)
        if found is not aiohttp.WSMessageTypeError  # of web sockets
    ]

    assert len(errors) > 20
    for error in errors:
        assert issubclass(error, aiohttp.ClientError | OSError | TimeoutError), error


def test_events_are_read_whole_however_they_are_cut() -> None:
    text = (
        "data: {1}\n\n: a comment\ndata: " + "x" * 300_000 + "\r\n\ndata: {3}\n\ndata: [DONE]\n\n"
    )
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"

    async def read(wire: Wire) -> list[bytes]:
        return [event.strip() async for event in wire.events("/generate", 60, {})]

    assert run((head + text).encode(), read) == [b"{1}", b"x" * 300_000, b"{3}"]


def test_a_server_that_does_not_stream_gives_its_one_reply() -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"

    async def read(wire: Wire) -> list[bytes]:
        return [event async for event in wire.events("/generate", 5, {})]

    assert run(reply, read) == [b"{}"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": "too long", "code": 400}}, PromptRejected),
        ({"error": {"message": "busy", "code": 503}}, EngineUnavailable),
        ({"error": {"message": "?", "code": "model_not_found"}}, EngineUnavailable),
        ({"error": "broken"}, EngineUnavailable),
        ({"object": "error", "message": "too long", "code": 400}, PromptRejected),
        ({"error": None}, type(None)),
        ({"text": "fine"}, type(None)),
    ],
)
def test_a_refusal_with_status_200_has_the_same_fate(body: dict[str, Any], expected: type) -> None:
    async def once() -> FleetError | None:
        wire = Wire("http://nowhere")
        await wire.close()
        return wire.refusal_in(body)

    assert type(asyncio.run(once())) is expected
