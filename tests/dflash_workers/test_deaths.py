"""A death is seen however short it is, and a network that was cut is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import EngineUnavailable
from dflash_workers.contract.records import RunSpec
from dflash_workers.engine import Engine
from tests.dflash_workers.asking import Asking
from tests.fake_engine import FakeEngine


@pytest.fixture
def asking(engine: FakeEngine, chat: Chat, spec: RunSpec) -> Asking:
    return Asking(engine, chat, spec)


async def in_flight(asking: Asking, engine: Engine, *messages: str) -> list[asyncio.Task[Any]]:
    """Requests that have arrived."""
    tasks = [asyncio.create_task(engine.generate(asking.question(m))) for m in messages]
    while asking.fake.running < len(messages):
        await asyncio.sleep(0.01)
    return tasks


@pytest.mark.parametrize("tells_life", [True, False])
def test_an_engine_that_is_back_at_once_was_seen_to_die(asking: Asking, tells_life: bool) -> None:
    asking.fake.tells_life = tells_life

    async def ask(engine: Engine) -> int:
        await engine.look()
        work = await in_flight(asking, engine, "hang a", "hang b", "hang c")
        asking.fake.die()
        asking.fake.revive()
        for ended in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(ended, EngineUnavailable)
            assert "the engine died: its process was replaced by another" in str(ended)
        await engine.look()
        return engine.num_deaths

    assert asking.run(ask) == 1
    assert sorted(asking.fake.asked) == ["hang a", "hang b", "hang c"]


@pytest.mark.parametrize("tells_life", [True, False])
def test_connections_that_are_cut_are_no_death(asking: Asking, tells_life: bool) -> None:
    asking.fake.tells_life = tells_life

    async def ask(engine: Engine) -> int:
        await engine.look()
        work = await in_flight(asking, engine, "wait=0.3 a", "wait=0.3 b")
        asking.fake.cut()
        await asyncio.gather(*work)
        return engine.num_deaths

    assert asking.run(ask) == 0
    assert sorted(asking.fake.asked) == ["wait=0.3 a"] * 2 + ["wait=0.3 b"] * 2


def test_a_death_that_nobody_saw_is_seen_at_the_next_look(asking: Asking) -> None:
    async def look(engine: Engine) -> list[int]:
        seen = []
        for _ in range(2):
            await engine.look()
            seen.append(engine.num_deaths)
        asking.fake.die()
        asking.fake.revive()
        for _ in range(2):
            await engine.look()
            seen.append(engine.num_deaths)
        return seen

    assert asking.run(look) == [0, 0, 1, 1]


def test_a_death_is_counted_once_whether_it_is_seen_before_or_after_the_next_life(
    asking: Asking,
) -> None:
    async def look(engine: Engine) -> tuple[int, bool]:
        await engine.look()
        asking.fake.die()
        await engine.died()
        asking.fake.revive()
        await engine.look()
        return engine.num_deaths, engine.was_cut(1)

    assert asking.run(look) == (1, False)


def test_an_engine_that_could_not_be_reached_and_is_the_same_was_cut_off(asking: Asking) -> None:
    """As behind a network that fails for a second: nobody is reached, and then the same one."""

    async def look(engine: Engine) -> tuple[int, bool, bool]:
        await engine.look()
        asking.fake.hide()
        evidence = await engine.died()
        before = engine.was_cut(1)
        asking.fake.revive()
        await engine.look()
        assert evidence
        return engine.num_deaths, before, engine.was_cut(1)

    assert asking.run(look) == (1, False, True)


def test_an_engine_that_hung_did_not_lose_its_connection(asking: Asking) -> None:
    async def look(engine: Engine) -> bool:
        await engine.look()
        await engine.died("no token for 180 s")
        await engine.look()
        return engine.was_cut(1)

    assert asking.run(look) is False
