"""One request: what is heard of it while it runs, how it ends early, and when it is given up."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import EngineUnavailable
from dflash_workers.contract.records import RunSpec
from dflash_workers.engine import Engine, Generation, Leaving
from tests.dflash_workers.asking import PATIENCE, Asking
from tests.fake_engine import FakeEngine


@pytest.fixture
def asking(engine: FakeEngine, chat: Chat, spec: RunSpec) -> Asking:
    return Asking(engine, chat, spec)


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("message", ["long", "say:" + "one two three " * 30])
def test_a_streamed_answer_is_the_same_whole_or_in_pieces(
    asking: Asking, message: str, is_incremental: bool
) -> None:
    asking.fake.is_incremental = is_incremental

    streamed = asking.ask(message, 250, heard=lambda ids: True, hear_every=7)
    asking.fake.streams = False
    whole = asking.ask(message, 250)

    assert streamed.output_ids == whole.output_ids
    assert asking.fake.requests[0]["sampling_params"]["stream_interval"] == 7


def test_ids_are_heard_while_they_come(asking: Asking) -> None:
    heard: list[list[int]] = []

    def hear(ids: list[int]) -> bool:
        heard.append(ids)
        return True

    generation = asking.ask("long", 100, heard=hear, hear_every=32)

    assert [len(ids) for ids in heard] == [33, 65, 97]
    assert all(generation.output_ids[: len(ids)] == ids for ids in heard)


def test_an_answer_that_nobody_wants_any_more_is_stopped(asking: Asking) -> None:
    generation = asking.ask("long step=0.05", 200, heard=lambda ids: len(ids) < 60, hear_every=20)

    assert (generation.finish_reason, len(generation.output_ids)) == ("abort", 61)
    assert asking.fake.aborted == [asking.fake.requests[0]["rid"]]


@pytest.mark.parametrize(
    ("message", "num_tokens", "num_ids"), [("long step=0.05", 1000, 65), ("hang", 64, 4)]
)
def test_leaving_gives_the_ids_so_far_within_a_second(
    asking: Asking, message: str, num_tokens: int, num_ids: int
) -> None:
    async def leave(engine: Engine) -> tuple[Generation, float]:
        leaving = Leaving()
        question = asking.question(message, num_tokens)
        work = asyncio.create_task(engine.generate(question, leaving=leaving))
        while not asking.fake.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.08)
        leaving.set()
        started = time.monotonic()
        return await work, time.monotonic() - started

    generation, took_s = asking.run(leave)

    assert generation.finish_reason == "abort"
    assert len(generation.output_ids) >= num_ids
    assert len(asking.fake.aborted) == 1
    assert took_s < 1.0


@pytest.mark.parametrize("answers_aborts", [True, False])
def test_leaving_an_engine_that_no_longer_answers_gives_what_was_streamed(
    asking: Asking, answers_aborts: bool
) -> None:
    asking.fake.hears_aborts = False
    asking.fake.answers_aborts = answers_aborts

    async def leave(engine: Engine) -> tuple[Generation, float]:
        leaving = Leaving()
        work = asyncio.create_task(
            engine.generate(asking.question("long stall", 1000), leaving=leaving)
        )
        while not asking.fake.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        leaving.set()
        started = time.monotonic()
        return await work, time.monotonic() - started

    generation, took_s = asking.run(leave)

    assert (generation.finish_reason, len(generation.output_ids)) == ("abort", 1)
    assert took_s < 2 * PATIENCE.abort_s  # a batch that leaves has to be noted by then


def test_nothing_is_asked_once_leaving(asking: Asking) -> None:
    async def ask(engine: Engine) -> Generation:
        leaving = Leaving()
        leaving.set()
        return await engine.generate(asking.question("hello"), leaving=leaving)

    generation = asking.run(ask)

    assert (generation.output_ids, generation.finish_reason) == ([], "abort")
    assert asking.fake.requests == []


def test_a_request_without_an_answer_is_aborted(asking: Asking) -> None:
    async def leave(engine: Engine) -> None:
        work = asyncio.create_task(engine.generate(asking.question("wait=30")))
        while not asking.fake.running:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])

    asking.run(leave)

    assert asking.fake.aborted == [asking.fake.requests[0]["rid"]]


def test_a_batch_grows_with_each_event_of_its_answers(asking: Asking) -> None:
    question = asking.question("long", 100)
    grown: list[float] = []

    def hear(ids: list[int]) -> bool:
        grown.append(question.growth.at_s)
        return True

    asking.run(lambda engine: engine.generate(question, heard=hear, hear_every=32))

    assert len(grown) == len(set(grown)) == 3


def test_a_slow_answer_is_waited_for_as_long_as_ids_come(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60)

    generation = asking.ask("long step=0.1", 80, heard=lambda ids: True, hear_every=8)

    assert len(generation.output_ids) == 80
    assert generation.latency_s > 3 * PATIENCE.stall_s


def test_an_engine_that_is_healthy_and_yet_gives_nothing_is_stuck(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60)

    async def ask(engine: Engine) -> tuple[str | None, str | None]:
        before = await engine.died()
        with pytest.raises(EngineUnavailable, match="no new id in any request"):
            await engine.generate(asking.question("long stall", 1000))
        return before, await engine.died()

    before, after = asking.run(ask)

    assert before is None
    assert after and "no new id in any request for 0.3 s" in after
    assert len(asking.fake.requests) == 1


def test_an_answer_that_takes_seconds_at_the_pace_seen_is_one_reply_and_its_silence_still_counts(
    asking: Asking,
) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60)

    async def ask(engine: Engine) -> str | None:
        for number in range(17):
            await engine.generate(asking.question(f"long {number}", 100))
        with pytest.raises(EngineUnavailable, match="no new id in any request"):
            await engine.generate(asking.question("hang", 500))
        return await engine.died()

    died = asking.run(ask)

    assert died and "no new id in any request for 0.3 s" in died
    streamed = [bool(request.get("stream")) for request in asking.fake.requests]
    assert streamed == [True] * 16 + [False] * 2


def test_a_worker_that_stood_still_itself_gives_up_no_request_that_goes_on(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60, away_s=0)

    async def stand_still(engine: Engine) -> Generation:
        heard = asyncio.Event()

        def hear(ids: list[int]) -> bool:
            heard.set()
            return True

        question = asking.question("long step=0.05", 60)
        going_on = asyncio.create_task(engine.generate(question, heard=hear, hear_every=1))
        await heard.wait()
        time.sleep(3 * PATIENCE.stall_s)  # in the loop, as a process stands that was stopped
        return await going_on

    generation = asking.run(stand_still)

    assert len(generation.output_ids) == 60
    assert len(asking.fake.requests) == 1


def test_a_request_may_wait_in_the_engine_while_others_go_on(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60)

    async def ask(engine: Engine) -> list[Generation]:
        waiting = engine.generate(asking.question("wait=1 long", 100))
        going_on = engine.generate(asking.question("long step=0.1", 1000))
        return list(await asyncio.gather(waiting, going_on))

    waited, _ = asking.run(ask)

    assert len(waited.output_ids) == 100
    assert len(asking.fake.requests) == 2


def test_a_request_that_the_engine_lost_while_others_go_on_is_given_up(asking: Asking) -> None:
    asking.patience = dataclasses.replace(PATIENCE, request_s=60, lost_s=0.5, away_s=0)

    async def ask(engine: Engine) -> str | None:
        going_on = asyncio.create_task(engine.generate(asking.question("long step=0.1", 1000)))
        with pytest.raises(EngineUnavailable, match="in a request that had begun"):
            await engine.generate(asking.question("long stall", 1000))
        await going_on
        return await engine.died()

    assert asking.run(ask) is None


def test_tokens_are_counted_while_they_come(asking: Asking) -> None:
    async def ask(engine: Engine) -> list[int]:
        counts: list[int] = []

        def hear(ids: list[int]) -> bool:
            counts.append(engine.num_tokens)
            return True

        question = asking.question("long", 100)
        await engine.generate(question, heard=hear, hear_every=32)
        return [*counts, engine.num_tokens]

    assert asking.run(ask) == [33, 65, 97, 100]
