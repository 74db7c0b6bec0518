"""Who came, who went and who died: told from heartbeats alone, by one observer at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from dflash_workers.contract.events import (
    DIED,
    JOINED,
    LEFT,
    REPLACED,
    SAMPLE,
    STATE,
    read_events,
)
from dflash_workers.contract.hints import Hints
from dflash_workers.roll import Roll


class Workers:
    """Heartbeats as workers leave them in Redis."""

    def __init__(self, client: redis.Redis, hints: Hints) -> None:
        self._client, self._hints = client, hints

    def beat(
        self, slot: str, process: str = "p1", state: str = "up", lapses_ms: int = 15_000
    ) -> None:
        key = self._hints.keys.worker(slot)
        facts = {"process": process, "state": state, "in_flight": "7", "tokens_per_s": "20.5"}
        self._client.hset(key, mapping=facts)
        self._client.pexpire(key, lapses_ms)

    def say_goodbye(self, slot: str) -> None:
        self._client.delete(self._hints.keys.worker(slot))

    def happened(self) -> list[tuple[str, str]]:
        events = read_events(self._client, self._hints.keys)
        return [(event.kind, event.slot) for event in events if event.kind != SAMPLE]


@pytest.fixture
def workers(redis_client: redis.Redis, hints: Hints) -> Workers:
    return Workers(redis_client, hints)


@pytest.fixture
def roll(redis_client: redis.Redis, hints: Hints) -> Iterator[Roll]:
    roll = Roll(redis_client, hints.keys, every_s=0)
    yield roll
    roll.leave()


def test_comings_and_goings_are_told_apart(
    roll: Roll, workers: Workers, redis_client: redis.Redis, hints: Hints
) -> None:
    for slot in ("leaves", "stays", "restarts", "drains"):
        workers.beat(slot)
    roll.look()
    workers.say_goodbye("leaves")
    workers.beat("restarts", process="p2")
    workers.beat("drains", state="draining")

    roll.look()
    roll.look()

    assert workers.happened() == [
        *((JOINED, slot) for slot in ("drains", "leaves", "restarts", "stays")),
        (LEFT, "leaves"),
        (STATE, "drains"),
        (REPLACED, "restarts"),
    ]
    (sample,) = [e for e in read_events(redis_client, hints.keys) if e.kind == SAMPLE]
    assert sample.facts["workers"] == {"up": 4}
    assert (sample.facts["in_flight"], sample.facts["tokens_per_s"]) == (28, 82)


def test_ten_that_are_killed_at_once_are_ten_deaths_and_no_ghosts(
    roll: Roll, workers: Workers, redis_client: redis.Redis, hints: Hints
) -> None:
    slots = [f"w{number}" for number in range(10)]
    for slot in slots:
        workers.beat(slot, lapses_ms=900)  # the last beat of each
    roll.look()

    while redis_client.exists(*(hints.keys.worker(slot) for slot in slots)):
        pass
    roll.look()

    assert sorted(workers.happened()) == sorted(
        [(kind, slot) for slot in slots for kind in (JOINED, DIED)]
    )
    assert redis_client.hgetall(hints.keys.roll) == {}


def test_another_observer_goes_on_where_the_last_one_was(
    roll: Roll, workers: Workers, redis_client: redis.Redis, hints: Hints
) -> None:
    workers.beat("w1")
    workers.beat("w2")
    other = Roll(redis_client, hints.keys, every_s=0)
    roll.look()
    other.look()  # not its turn

    roll.leave()
    workers.say_goodbye("w2")
    other.look()

    assert workers.happened() == [(JOINED, "w1"), (JOINED, "w2"), (LEFT, "w2")]
    other.leave()
