"""What the engine answers, and what becomes of each way in which it doesn't."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, EngineUnavailable, PromptRejected
from dflash_workers.contract.records import RunSpec
from dflash_workers.engine import Engine, Generation, Patience
from tests.fake_engine import FakeEngine

PATIENCE = Patience(
    request_s=0.5, token_s=0.0, away_s=0.6, backoff_s=0.05, max_backoff_s=0.1, abort_s=0.5
)


@asynccontextmanager
async def opened(url: str, patience: Patience = PATIENCE) -> AsyncIterator[Engine]:
    engine = Engine(url, 4, patience)
    try:
        yield engine
    finally:
        await engine.close()


def ask(fake: FakeEngine, chat: Chat, spec: RunSpec, message: str) -> Generation:
    async def once() -> Generation:
        ids = chat.prompt_ids([{"role": "user", "content": message}], [])
        async with opened(fake.url) as engine:
            return await engine.generate(ids, 11, spec)

    return asyncio.run(once())


def test_an_answer_comes_back_as_the_ids_that_were_sampled(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    generation = ask(engine, chat, spec, "hello say:Good day.")

    assert chat.text(generation.output_ids) == "Good day."
    assert generation.output_ids[-1] in spec.sampling.stop_token_ids
    assert generation.finish_reason == "stop"


def test_every_sampling_value_is_said_explicitly(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    ask(engine, chat, spec, "hello")

    (request,) = engine.requests
    assert request["sampling_params"] == dataclasses.asdict(spec.sampling) | {"sampling_seed": 11}
    assert len(request["rid"]) == 32


@pytest.mark.parametrize("message", ["fail=2", "cut"])
def test_what_may_pass_is_asked_again(
    engine: FakeEngine, chat: Chat, spec: RunSpec, message: str
) -> None:
    generation = ask(engine, chat, spec, message)

    assert chat.text(generation.output_ids) == f"Answer to {message}"
    assert len({request["rid"] for request in engine.requests}) == len(engine.requests) > 1


@pytest.mark.parametrize("message", ["fail=1000", "mismatch", "hang"])
def test_an_engine_that_stays_bad_is_given_up_within_the_deadline(
    engine: FakeEngine, chat: Chat, spec: RunSpec, message: str
) -> None:
    started = time.monotonic()

    with pytest.raises(EngineUnavailable):
        ask(engine, chat, spec, message)

    assert time.monotonic() - started < 3 * (PATIENCE.away_s + PATIENCE.request_s)
    assert len(engine.requests) > 1


def test_a_request_without_an_answer_is_aborted(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    async def leave() -> None:
        ids = chat.prompt_ids([{"role": "user", "content": "wait=30"}], [])
        async with opened(engine.url) as client:
            work = asyncio.create_task(client.generate(ids, 1, spec))
            while not engine.running:
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait([work])

    asyncio.run(leave())

    assert engine.aborted == [engine.requests[0]["rid"]]


def test_a_refusal_is_the_prompts_own_fault_and_not_asked_again(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    with pytest.raises(PromptRejected, match="refused") as caught:
        ask(engine, chat, spec, "refuse")

    assert caught.value.reason == "engine_refused"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("ids", [[], [1, 512], [-1, 3]])
def test_ids_that_would_kill_the_server_are_never_sent(
    engine: FakeEngine, spec: RunSpec, ids: list[int]
) -> None:
    async def once() -> None:
        async with opened(engine.url) as client:
            await client.generate(ids, 1, spec)

    with pytest.raises(PromptRejected):
        asyncio.run(once())

    assert engine.requests == []


def test_a_missing_engine_is_said_in_one_clear_line() -> None:
    async def wait() -> None:
        async with opened("http://127.0.0.1:1") as client:
            await client.wait_until_ready(0.2)

    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1.*--engine-url"):
        asyncio.run(wait())


def replies() -> dict[str, Any]:
    good = {
        "output_ids": [5, 6, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 2,
            "completion_tokens": 3,
        },
    }
    meta = good["meta_info"]
    assert isinstance(meta, dict)
    return {
        "outside": good | {"output_ids": [5, 6, 512]},
        "count": good | {"meta_info": meta | {"completion_tokens": 4}},
        "prompt": good | {"meta_info": meta | {"prompt_tokens": 3}},
        "aborted": good | {"meta_info": meta | {"finish_reason": {"type": "abort"}}},
        "unfinished": good | {"meta_info": meta | {"finish_reason": None}},
        "nothing": good | {"output_ids": [], "meta_info": meta | {"completion_tokens": 0}},
        "garbled": [1],
    }


@pytest.mark.parametrize("name", replies())
def test_a_reply_that_contradicts_itself_is_never_believed(
    name: str, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reply(self: Engine, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        return json.dumps(replies()[name]).encode()

    monkeypatch.setattr(Engine, "_call", reply)

    async def once() -> None:
        async with opened("http://nowhere", dataclasses.replace(PATIENCE, away_s=0)) as client:
            await client.generate([1, 2], 1, spec)

    with pytest.raises(EngineUnavailable):
        asyncio.run(once())


@pytest.fixture
def other_server(tmp_path: Path) -> Iterator[str]:
    """A web server that is no engine: it answers /health, knows no /generate, serves pages."""
    (tmp_path / "health").touch()
    (tmp_path / "server_info").write_text("<html></html>")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_prompt_is_rejected_because_something_else_listens_there(
    other_server: str, chat: Chat, spec: RunSpec
) -> None:
    async def ask_it() -> None:
        async with opened(other_server) as engine:
            await engine.wait_until_ready(1)
            with pytest.raises(BadInput, match="is no SGLang server"):
                await engine.facts()
            with pytest.raises(EngineUnavailable):
                await engine.generate([1, 2], 0, spec)

    asyncio.run(ask_it())
