"""What the engine answers, and what becomes of each way in which it doesn't."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, EngineUnavailable, PromptRejected
from dflash_workers.contract.records import RunSpec
from dflash_workers.engine import Engine, Generation, Leaving
from tests.dflash_workers.asking import PATIENCE, Asking, opened
from tests.fake_engine import FakeEngine
from tests.tiny_model import VOCAB_SIZE


@pytest.fixture
def asking(engine: FakeEngine, chat: Chat, spec: RunSpec) -> Asking:
    return Asking(engine, chat, spec)


@pytest.mark.parametrize("num_tokens", [64, 1000])
def test_an_answer_comes_back_as_the_ids_that_were_sampled(asking: Asking, num_tokens: int) -> None:
    generation = asking.ask("hello say:Good day.", num_tokens)

    assert asking.chat.text(generation.output_ids) == "Good day."
    assert generation.output_ids[-1] in asking.spec.sampling.stop_token_ids
    assert (generation.finish_reason, generation.notes) == ("stop", ())


def test_every_sampling_value_is_said_explicitly(asking: Asking) -> None:
    asking.ask("hello")

    (request,) = asking.fake.requests
    wanted = dataclasses.asdict(asking.spec.sampling) | {"sampling_seed": 11}
    assert request["sampling_params"] == wanted
    assert len(request["rid"]) == 32


@pytest.mark.parametrize(
    "message", ["fail=2", "cut", "gaveup", *(f"status={s} fail=1" for s in (408, 429, 503, 418))]
)
@pytest.mark.parametrize("num_tokens", [64, 1000])
def test_what_may_pass_is_asked_again(asking: Asking, message: str, num_tokens: int) -> None:
    generation = asking.ask(message, num_tokens)

    assert asking.chat.text(generation.output_ids) == f"Answer to {message}"
    requests = asking.fake.requests
    assert len({request["rid"] for request in requests}) == len(requests) > 1


@pytest.mark.parametrize(
    "message",
    [
        *("fail=1000", "hang", "garbled", "truncated"),
        *("mismatch", "echo", "outside", "othertext", "status=404 fail=1000"),
    ],
)
def test_an_engine_that_stays_bad_is_given_up_within_the_deadline(
    asking: Asking, message: str
) -> None:
    started = time.monotonic()

    with pytest.raises(EngineUnavailable):
        asking.ask(message)

    assert time.monotonic() - started < 3 * (PATIENCE.away_s + PATIENCE.request_s)
    assert len(asking.fake.requests) > 1


def test_an_engine_that_asks_for_peace_is_left_alone_for_so_long(asking: Asking) -> None:
    started = time.monotonic()

    asking.ask("status=503 fail=1 after=0.5")

    assert 0.5 <= time.monotonic() - started < 1.5


def test_a_refusal_is_the_prompts_own_fault_and_not_asked_again(asking: Asking) -> None:
    for num_tokens in (64, 1000):  # the second one inside a stream, with status 200
        with pytest.raises(PromptRejected, match="refused") as caught:
            asking.ask("refuse", num_tokens)
        assert caught.value.reason == "engine_refused"

    assert len(asking.fake.requests) == 2


@pytest.mark.parametrize("ids", [[], [1, VOCAB_SIZE], [-1, 3]])
def test_ids_that_would_kill_the_server_are_never_sent(asking: Asking, ids: list[int]) -> None:
    question = dataclasses.replace(asking.question("hello"), input_ids=ids)

    with pytest.raises(PromptRejected):
        asking.run(lambda engine: engine.generate(question))

    assert asking.fake.requests == []


def test_a_goodbye_does_not_wait_for_the_next_try(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, away_s=60)

    async def leave(engine: Engine) -> Generation:
        leaving = Leaving()
        asyncio.get_running_loop().call_later(0.3, leaving.set)
        question = asking.question("status=503 fail=1000 after=50")
        return await engine.generate(question, leaving=leaving)

    started = time.monotonic()
    generation = asking.run(leave)

    assert (generation.output_ids, generation.finish_reason) == ([], "abort")
    assert time.monotonic() - started < 1.5


def test_what_an_engine_died_of_is_not_asked_again(asking: Asking) -> None:
    outcomes: list[bool] = []

    async def ask(engine: Engine) -> tuple[int, str | None]:
        engine.on_outcome = outcomes.append
        work = [
            asyncio.create_task(engine.generate(asking.question(f"hang {n}"))) for n in range(4)
        ]
        while asking.fake.running < 4:
            await asyncio.sleep(0.01)
        asking.fake.die()
        for ended in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(ended, EngineUnavailable)
            assert "the engine died" in str(ended)
        return engine.num_deaths, await engine.died()

    num_deaths, evidence = asking.run(ask)

    assert num_deaths == 1
    assert evidence and "Cannot connect" in evidence
    assert outcomes == [False] * 4
    assert len(asking.fake.requests) == 4


def test_a_failing_probe_alone_is_no_death(asking: Asking) -> None:
    asking.fake.is_healthy = False

    async def ask(engine: Engine) -> str | None:
        work = asyncio.create_task(engine.generate(asking.question("wait=0.3")))
        evidence = await engine.died()
        await work
        return evidence

    assert asking.run(ask) is None


def test_many_who_ask_at_once_share_a_probe(asking: Asking) -> None:
    async def ask(engine: Engine) -> list[str | None]:
        return list(await asyncio.gather(*(engine.died() for _ in range(48))))

    assert asking.run(ask) == [None] * 48
    assert asking.fake.num_probes <= 2


def test_successes_refusals_and_failures_are_told(asking: Asking) -> None:
    outcomes: list[bool] = []

    async def ask(engine: Engine) -> tuple[int, int]:
        engine.on_outcome = outcomes.append
        generation = await engine.generate(asking.question("fail=1"))
        with pytest.raises(PromptRejected):
            await engine.generate(asking.question("refuse"))
        assert engine.num_tokens == len(generation.output_ids)
        return engine.num_replies, engine.num_running

    assert asking.run(ask) == (2, 0)
    assert outcomes == [False, True, True]


def test_log_probabilities_are_of_each_id_but_the_first(asking: Asking) -> None:
    found = asking.run(lambda engine: engine.log_probs([5, 6, 7]))
    asking.fake.has_log_probs = False
    refused = asking.run(lambda engine: engine.log_probs([5, 6, 7]))

    assert len(found) == 2
    assert refused is None


def test_a_missing_engine_is_not_waited_for_without_end() -> None:
    async def wait() -> None:
        async with opened("http://127.0.0.1:1") as client:
            await client.wait_until_there(0.2)

    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1"):
        asyncio.run(wait())


def test_an_engine_that_calls_itself_unhealthy_is_there(asking: Asking) -> None:
    asking.fake.is_healthy = False

    asking.run(lambda engine: engine.wait_until_there(0.2))


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
    other_server: str, asking: Asking
) -> None:
    async def ask_it() -> None:
        async with opened(other_server) as engine:
            await engine.wait_until_there(1)
            with pytest.raises(BadInput, match="is no SGLang server"):
                await engine.look()
            with pytest.raises(EngineUnavailable):
                await engine.generate(asking.question("hello"))

    asyncio.run(ask_it())
