"""Who may go into the engine, in which order, and alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress

import pytest

from dflash_workers.contract.errors import Draining
from dflash_workers.seats import Seats, every_slot


def run_all(*work: Coroutine[object, object, None]) -> None:
    """To their ends, or fail within seconds."""

    async def all_of_it() -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*work)

    asyncio.run(all_of_it())


def test_who_came_first_goes_in_first_whatever_batch_it_is_of() -> None:
    slot, order = asyncio.Semaphore(1), list[str]()
    batches = [Seats(), Seats()]

    async def sit(number: int) -> None:
        async with batches[number % 2].take(f"{number}", slot):
            order.append(f"{number}")
            await asyncio.sleep(0)

    run_all(*map(sit, range(6)))

    assert order == ["0", "1", "2", "3", "4", "5"]


def test_once_closed_who_waits_is_told_at_once_and_who_is_in_may_end() -> None:
    slot, seats, fates = asyncio.Semaphore(1), Seats(), dict[str, str]()
    may_end = asyncio.Event()

    async def sit(name: str) -> None:
        try:
            async with seats.take(name, slot):
                await may_end.wait()
                fates[name] = "ended"
        except Draining:
            fates[name] = "not started"

    async def close() -> None:
        await asyncio.sleep(0.01)
        assert seats.taken == {"first"}
        seats.close()
        await asyncio.sleep(0.01)
        assert fates == {"second": "not started", "third": "not started"}
        await sit("late")
        may_end.set()

    run_all(sit("first"), sit("second"), sit("third"), close())

    assert fates.pop("late") == "not started"
    assert fates == {"first": "ended", "second": "not started", "third": "not started"}
    assert seats.taken == set()
    assert not slot.locked()


def test_who_is_cancelled_while_waiting_is_cancelled() -> None:
    slot, seats = asyncio.Semaphore(1), Seats()

    async def sit() -> None:
        async with seats.take("key", slot):
            pass

    async def cancel() -> None:
        await slot.acquire()
        waiting = asyncio.create_task(sit())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        slot.release()

    run_all(cancel())

    assert not slot.locked()


def test_two_batches_that_each_want_every_slot_get_it_one_after_the_other() -> None:
    slot, order = asyncio.Semaphore(3), list[str]()

    async def alone(name: str) -> None:
        async with every_slot(slot, 3), Seats(is_alone=True).take(name, slot):
            order.append(f"{name} in")
            await asyncio.sleep(0.01)
            order.append(f"{name} out")

    async def sit(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with Seats().take(name, slot):
            await asyncio.sleep(0.01)
            order.append(name)

    run_all(sit("before", 0), alone("a"), alone("b"), sit("after", 0.005))

    assert order == ["before", "a in", "a out", "b in", "b out", "after"]


def test_who_stops_waiting_for_every_slot_gives_back_those_that_it_had() -> None:
    slot = asyncio.Semaphore(3)

    async def give_up() -> None:
        await slot.acquire()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05), every_slot(slot, 3):
                raise AssertionError("there were only two")
        slot.release()
        async with every_slot(slot, 3):
            assert slot.locked()

    run_all(give_up())
