"""One round trip for all batches: who is on it, and whom its troubles reach."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dflash_workers.claims import Claim
from dflash_workers.contract.errors import AccessDenied, QueueUnavailable
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.records import Answer, BatchMessage
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import start_redis
from dflash_workers.journal import Journal, Journals
from dflash_workers.notes import Partial, digest_of
from dflash_workers.round_trips import Command, RoundTrips
from tests.batches import cut_off

ASKED = [1, 2, 3]


def answer(output_ids: list[int]) -> Answer:
    return Answer(0, ASKED, output_ids, [len(output_ids)], "", "", [], "stop", 0, 0.5, 7)


def journal_of(journals: Journals, name: str) -> Journal:
    return journals.open(Claim(BatchMessage("run", 0, name), name))


def num_reads(client: redis.Redis) -> int:
    """How often Redis has read from anybody, this call included."""
    return int(client.info("stats")["total_reads_processed"])


class Setter:
    """Sets a key; holds its trip up until it may go."""

    def __init__(self, key: str, num_times: int = 1) -> None:
        self.may_go, self.is_aboard = threading.Event(), threading.Event()
        self.may_go.set()
        self.missed: QueueUnavailable | None = None
        self._key, self._left = key, num_times

    def commands(self) -> list[Command]:
        self.is_aboard.set()
        self.may_go.wait(10)
        return [("INCR", self._key)]

    def hear(self, replies: Sequence[Any]) -> bool:
        self._left -= 1
        return self._left > 0

    def miss(self, error: QueueUnavailable) -> None:
        self.missed = error


@pytest.fixture
def client(redis_settings: Settings) -> Iterator[redis.Redis]:
    client = open_redis(redis_settings)
    client.set_retry(Retry(NoBackoff(), 0))
    client.ping()
    yield client
    client.close()


@pytest.fixture
def trips(client: redis.Redis) -> RoundTrips:
    return RoundTrips(client, "here")


def sent(trips: RoundTrips, *passengers: Setter) -> list[Future[None]]:
    waits: list[Future[None]] = [Future() for _ in passengers]
    for passenger, over in zip(passengers, waits, strict=True):
        trips.join(passenger, over)
    return waits


def test_what_comes_while_a_trip_is_under_way_goes_together_on_the_next(
    trips: RoundTrips, redis_client: redis.Redis, redis_settings: Settings
) -> None:
    first = Setter(f"{redis_settings.redis_prefix}first")
    others = [Setter(f"{redis_settings.redis_prefix}{n}") for n in range(10)]
    first.may_go.clear()
    before = num_reads(redis_client)

    over = sent(trips, first)
    trips.go()
    first.is_aboard.wait(10)
    for other in others:
        over += sent(trips, other)
        trips.go()
    first.may_go.set()
    for each in over:
        each.result(10)

    assert num_reads(redis_client) - before == 2 + 1
    assert len(redis_client.keys(f"{redis_settings.redis_prefix}*")) == 11


def test_a_trip_begins_when_somebody_says_so_and_takes_all_who_have_joined(
    trips: RoundTrips, redis_client: redis.Redis, redis_settings: Settings
) -> None:
    passengers = [Setter(f"{redis_settings.redis_prefix}{n}") for n in range(3)]
    over = sent(trips, *passengers)
    trips_before = [passenger.is_aboard.is_set() for passenger in passengers]

    trips.go()
    for each in over:
        each.result(10)

    assert trips_before == [False] * 3
    assert len(redis_client.keys(f"{redis_settings.redis_prefix}*")) == 3


def test_who_has_more_is_on_trips_until_all_of_it_is_said(
    trips: RoundTrips, redis_client: redis.Redis, redis_settings: Settings
) -> None:
    key = f"{redis_settings.redis_prefix}counter"
    (over,) = sent(trips, Setter(key, num_times=3))

    trips.go()
    over.result(10)

    assert redis_client.get(key) == b"3"


def test_an_error_that_is_not_redis_being_away_reaches_all_who_wait(
    client: redis.Redis, redis_settings: Settings
) -> None:
    key = f"{redis_settings.redis_prefix}counter"
    client.connection_pool.connection_kwargs["password"] = "wrong"
    client.connection_pool.reset()
    trips = RoundTrips(client, "here")

    over = sent(trips, Setter(key), Setter(key))
    trips.go()

    for each in over:
        with pytest.raises(AccessDenied):
            each.result(10)


def test_with_redis_away_nobody_waits_for_a_second_trip_to_find_that_out(
    trips: RoundTrips, client: redis.Redis, redis_settings: Settings
) -> None:
    passengers = [Setter(f"{redis_settings.redis_prefix}{n}") for n in range(40)]
    passengers[0].may_go.clear()
    cut_off(client)

    over = sent(trips, *passengers[:1])
    trips.go()
    passengers[0].is_aboard.wait(10)
    over += sent(trips, *passengers)
    passengers[0].may_go.set()
    for each in over:
        each.result(10)

    assert all(passenger.missed for passenger in passengers)
    assert [passenger.is_aboard.is_set() for passenger in passengers] == [True] + [False] * 39


def test_a_turn_that_ended_and_the_look_of_the_next_one_go_together(
    hints: Hints, client: redis.Redis, redis_client: redis.Redis
) -> None:
    journals = Journals(client, hints.keys, hints.where, together_s=10)
    ended, begun = journal_of(journals, "a"), journal_of(journals, "b")
    ended.put("k", Partial(digest_of(ASKED), 1, 7, [5], [1]))
    ended.flush()  # the script is known to Redis
    before = num_reads(redis_client)

    async def both() -> None:
        keeping = asyncio.create_task(ended.keep("k", answer([5])))
        await asyncio.sleep(0)
        assert await begun.find("k", 0, ASKED) is None
        await keeping

    asyncio.run(both())

    assert num_reads(redis_client) - before == 1 + 1


def test_a_batch_whose_notes_redis_refuses_holds_up_no_other_of_its_trip(
    hints: Hints, client: redis.Redis, redis_client: redis.Redis
) -> None:
    journals = Journals(client, hints.keys, hints.where, pause_s=3600, together_s=0.05)
    names = ["a", "refused", "b", "unreadable", "c"]
    redis_client.set(hints.keys.journal("run", "0/refused"), "no hash")
    redis_client.hset(hints.keys.journal("run", "0/unreadable"), "k:0", b"no row")
    before = num_reads(redis_client)

    async def keep_all() -> list[Answer]:
        return await asyncio.gather(
            *(journal_of(journals, n).keep("k", answer([5])) for n in names)
        )

    stand = asyncio.run(keep_all())
    reads = num_reads(redis_client) - before
    for name in ("a", "b", "c"):
        following = journal_of(journals, name)
        following.load()
        assert following.known("k", 0, ASKED) is not None

    assert reads == 1 + 1
    assert [each.output_ids for each in stand] == [[5]] * 5
    assert journals.take_paused() == {"refused"}


def test_when_redis_dies_within_a_trip_nothing_on_it_counts_as_noted_and_all_is_noted_again(
    hints: Hints, tmp_path: Path
) -> None:
    child, url = start_redis(tmp_path)
    client = redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 1))
    journals = Journals(client, hints.keys, hints.where, pause_s=3600, together_s=0.01)
    opened = {name: journal_of(journals, name) for name in ("a", "b", "c")}
    client.ping()

    async def keep_all() -> tuple[set[asyncio.Task[Answer]], list[Answer]]:
        keeping = [asyncio.create_task(j.keep("k", answer([5]))) for j in opened.values()]
        told_early, _ = await asyncio.wait(keeping, timeout=0.3)
        child.signal(signal.SIGKILL)
        return told_early, await asyncio.gather(*keeping)

    child.signal(signal.SIGSTOP)
    told_early, stand = asyncio.run(keep_all())
    child.stop(0)
    again, url = start_redis(tmp_path)
    client.connection_pool.connection_kwargs["port"] = int(url.rpartition(":")[2].partition("/")[0])
    client.connection_pool.reset()
    with again:
        is_lost = [not client.exists(hints.keys.journal("run", f"0/{name}")) for name in opened]
        for journal in opened.values():
            journal.load()
        noted = [client.hkeys(hints.keys.journal("run", f"0/{name}")) for name in opened]
    client.close()

    assert told_early == set()
    assert [each.output_ids for each in stand] == [[5]] * 3
    assert journals.take_paused() == {"a", "b", "c"}
    assert is_lost == [True] * 3
    assert noted == [[b"k:0"]] * 3


def test_a_holder_that_stops_waiting_takes_its_note_off_no_trip(
    hints: Hints, client: redis.Redis
) -> None:
    journals = Journals(client, hints.keys, hints.where, together_s=3600)
    journal = journal_of(journals, "a")

    async def leave() -> None:
        keeping = asyncio.create_task(journal.keep("k", answer([5])))
        await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(leave())
    journal.flush()

    following = journal_of(journals, "a")
    following.load()
    assert following.known("k", 0, ASKED) is not None


def test_a_script_that_redis_has_forgotten_is_run_all_the_same(
    hints: Hints, client: redis.Redis
) -> None:
    journals = Journals(client, hints.keys, hints.where)
    journal = journal_of(journals, "a")

    async def keep(name: str) -> Answer:
        return await journal.keep(name, answer([5]))

    asyncio.run(keep("before"))
    client.script_flush()
    asyncio.run(keep("after"))

    noted = client.hkeys(hints.keys.journal("run", "0/a"))
    assert sorted(noted) == [b"after:0", b"before:0"]
    assert journals.take_paused() == set()


def test_its_connection_is_nobody_elses_though_it_broke_and_redis_was_away(
    client: redis.Redis, trips: RoundTrips, monkeypatch: pytest.MonkeyPatch
) -> None:
    def travel() -> Setter:
        setter, over = Setter("trips"), Future[None]()
        trips.join(setter, over)
        trips.go()
        over.exception(10)
        return setter

    def is_away(_self: redis.Connection) -> None:
        raise redis.ConnectionError("nobody listens")

    travel()
    client.client_kill_filter(skipme=True)
    with monkeypatch.context() as patch:
        patch.setattr(redis.Connection, "connect", is_away)
        missed = [travel().missed for _ in range(2)]
    others = [client.connection_pool.get_connection() for _ in range(4)]
    for other in others:
        other.send_command("PING")  # type: ignore[no-untyped-call]

    reached = travel()

    assert all(missed) and reached.missed is None
    assert [other.read_response() for other in others] == [b"PONG"] * 4


def test_a_trip_whose_thread_could_not_be_started_holds_up_no_later_one(
    trips: RoundTrips, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    setter, over = Setter("trips"), Future[None]()
    trips.join(setter, over)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            trips.go()

    trips.go()

    assert over.exception(10) is None
