"""Who may go into the engine, in which order, and alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress

import pytest

from dflash_workers.contract.errors import Draining
from dflash_workers.seats import Seats, Slots


def run_all(*work: Coroutine[object, object, None]) -> None:
    """To their ends, or fail within seconds."""

    async def all_of_it() -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*work)

    asyncio.run(all_of_it())


def test_who_came_first_goes_in_first_whatever_batch_it_is_of() -> None:
    slots, order = Slots(1), list[str]()
    batches = [Seats(), Seats()]

    async def sit(number: int) -> None:
        async with batches[number % 2].take(f"{number}", slots):
            order.append(f"{number}")
            await asyncio.sleep(0)

    run_all(*map(sit, range(6)))

    assert order == ["0", "1", "2", "3", "4", "5"]


def test_what_a_dead_worker_left_goes_in_before_all_that_waits() -> None:
    slots, order = Slots(1), list[str]()

    async def sit(seats: Seats, name: str) -> None:
        async with seats.take(name, slots):
            order.append(name)
            await asyncio.sleep(0)

    heirs = Seats(is_first=True)
    ordinary = [sit(Seats(), name) for name in ("runs", "waits", "waits too")]
    run_all(*ordinary, sit(heirs, "left"), sit(heirs, "left too"))

    assert order == ["runs", "left", "left too", "waits", "waits too"]


def test_who_wants_every_slot_lets_in_what_a_dead_worker_left() -> None:
    slots, order = Slots(2), list[str]()

    async def sit(name: str, after_s: float, *, is_first: bool = False) -> None:
        await asyncio.sleep(after_s)
        async with Seats(is_first=is_first).take(name, slots):
            await asyncio.sleep(0.02)
            order.append(name)

    async def alone() -> None:
        async with slots.every():
            order.append("alone")

    run_all(sit("runs", 0), alone(), sit("after", 0.005), sit("left", 0.01, is_first=True))

    assert order == ["runs", "left", "alone", "after"]


def test_a_slot_that_comes_free_as_its_next_one_is_cancelled_is_not_lost() -> None:
    slots = Slots(1)

    async def sit() -> None:
        async with slots.one():
            pass

    async def give_up() -> None:
        async with slots.one():
            waiting = asyncio.create_task(sit())
            await asyncio.sleep(0)
        waiting.cancel()  # between its turn and its next step
        with suppress(asyncio.CancelledError):
            await waiting

    run_all(give_up())

    assert slots.num_free == 1


def test_once_closed_who_waits_is_told_at_once_and_who_is_in_may_end() -> None:
    slots, seats, fates = Slots(1), Seats(), dict[str, str]()
    may_end = asyncio.Event()

    async def sit(name: str) -> None:
        try:
            async with seats.take(name, slots):
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
    assert slots.num_free == 1


def test_who_is_cancelled_while_waiting_is_cancelled() -> None:
    slots, seats = Slots(1), Seats()

    async def sit() -> None:
        async with seats.take("key", slots):
            pass

    async def cancel() -> None:
        async with slots.one():
            waiting = asyncio.create_task(sit())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run_all(cancel())

    assert slots.num_free == 1


def test_two_batches_that_each_want_every_slot_get_it_one_after_the_other() -> None:
    slots, order = Slots(3), list[str]()

    async def alone(name: str) -> None:
        async with slots.every(), Seats(is_alone=True).take(name, slots):
            order.append(f"{name} in")
            await asyncio.sleep(0.01)
            order.append(f"{name} out")

    async def sit(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with Seats().take(name, slots):
            await asyncio.sleep(0.01)
            order.append(name)

    run_all(sit("before", 0), alone("a"), alone("b"), sit("after", 0.005))

    assert order == ["before", "a in", "a out", "b in", "b out", "after"]


def test_who_stops_waiting_for_every_slot_gives_back_those_that_it_had() -> None:
    slots = Slots(3)

    async def give_up() -> None:
        async with slots.one():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05), slots.every():
                    raise AssertionError("there were only two")
            assert slots.num_free == 2
        async with slots.every():
            assert slots.num_free == 0

    run_all(give_up())
