"""Replayed workers: what is recorded, that each plays under its own names, what is concluded."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.connection import Connection

from benchmarks.replay.account import Found, Law, figures_of, law_of
from benchmarks.replay.crowd import Cost, Crowd, measure
from benchmarks.replay.objects import Mix, StoreCost, measure_store, mix_of
from benchmarks.replay.recording import (
    Asked,
    HttpParser,
    Piece,
    Recorded,
    Recording,
    RedisParser,
)
from benchmarks.replay.tape import SLOT, make_tape
from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.keys import parse_batch_name
from dflash_workers.contract.records import Answer, BatchMessage
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import S3Login, start_redis
from dflash_workers.journal import Journals

BATCHES = [f"{number:024x}" for number in range(3)]


def packed(*args: str | bytes | int) -> bytes:
    """As redis-py sends it."""
    return b"".join(Connection().pack_command(*args))  # type: ignore[no-untyped-call]


def test_pipelines_are_kept_whole_however_their_bytes_arrive() -> None:
    sent = packed("SET", "k", b"\r\n*3\r\n$\x00") + packed("GET", "k")
    parser = RedisParser(connection=7)

    pieces = [piece for byte in sent for piece in parser.feed(bytes([byte]), 1.5)]
    at_once = RedisParser(7).feed(sent, 1.5)

    assert [piece.commands for piece in at_once] == [
        [[b"SET", b"k", b"\r\n*3\r\n$\x00"], [b"GET", b"k"]]
    ]
    assert b"".join(piece.body for piece in pieces) == at_once[0].body == sent
    assert [c for piece in pieces for c in piece.commands] == at_once[0].commands


def test_requests_are_told_from_their_bodies() -> None:
    body = b"GET / HTTP/1.1\r\n\r\n"  # which a body may look like
    put = b"PUT /b/data/1 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    get = b"GET /b/commits/1?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    parser = HttpParser(connection=0)

    asked = [one for byte in put + get for one in parser.feed(bytes([byte]), 2.0)]

    assert asked == HttpParser(0).feed(put + get, 2.0)
    assert [(one.method, one.path, one.body_bytes) for one in asked] == [
        ("PUT", "/b/data/1", len(body)),
        ("GET", "/b/commits/1?x=1", 0),
    ]


def test_a_recording_that_is_kept_is_the_same_without_its_password(tmp_path: Path) -> None:
    pieces = [
        *RedisParser(3).feed(packed("AUTH", "hidden"), 0.5),
        *RedisParser(3).feed(packed("SET", "k", b"\xff\x00"), 1.0),
    ]
    asked = Asked(2.0, "PUT", "/b/data/1", 17)

    Recorded(pieces, [asked], 3.0, 900.0, 1e5).keep(tmp_path / "kept")
    read = Recorded.read(tmp_path / "kept")

    assert b"hidden" not in (tmp_path / "kept").read_bytes()
    assert read == Recorded(pieces[1:], [asked], 3.0, 900.0, 1e5)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Settings]:
    """A Redis that may be emptied."""
    child, url = start_redis(tmp_path)
    with child:
        yield Settings(redis_url=url)


def record_work(settings: Settings) -> list[Piece]:
    """Of one that claims three batches, renews the first two, notes a prompt of the third and
    clears that, and says that it lives.
    """
    where = urlsplit(settings.redis_url)
    address = where.hostname or "", where.port or 0
    with Recording(address, RedisParser, time.monotonic()) as recording:
        url = settings.redis_url.replace(f":{where.port}/", f":{recording.port}/")
        hints = open_hints(dataclasses.replace(settings, redis_url=url))
        claims = Claims(hints.redis, hints, Timing())
        held = [claims.claim(BatchMessage("replay", 0, batch)) for batch in BATCHES]
        first, second, third = [claim for claim in held if claim]
        for claim in (first, second):
            claims.renew(claim)
        hints.redis.brpop(["q", "q3", "q6", "q9"], timeout=1)
        journal = Journals(hints.redis, hints.keys, hints.where).open(third)
        answer = Answer(0, [1, 2], [3, 4], [2], "", "", [], "stop", 0, 0.5, 7)
        asyncio.run(journal.keep("prompt", answer))
        claims.clear(third)
        hints.redis.hset(hints.keys.worker(SLOT.decode()), "state", "up")
        hints.redis.close()
        hints.app.close()
    return recording.kept


@pytest.mark.slow
def test_a_crowd_plays_what_was_recorded_each_worker_under_its_own_names(
    own_redis: Settings,
) -> None:
    pieces = record_work(own_redis)
    tape = make_tape(pieces, max(piece.at_s for piece in pieces) + 0.1, renew_every_s=0.2)

    with redis.Redis.from_url(own_redis.redis_url) as client:
        pace = 2 * tape.prompts_per_s
        cost = measure(client, own_redis.redis_url, tape, Crowd(20, pace), seconds=2.0)
        held = [parse_batch_name(name.decode())[1] for name in client.zrange(INFLIGHT, 0, -1)]
        leases = client.keys("dflash:lease:replay:*")
        workers = client.keys("dflash:worker:replay-*")

    assert cost.num_errors == 0
    assert {batch[:4] for batch in held} == {f"{number:04d}" for number in range(20)}
    assert {batch[4:] for batch in held} <= {batch[4:] for batch in BATCHES}
    assert 40 <= len(held) == len(leases) <= 60  # the third comes and goes
    assert len(workers) == 20
    assert 0 < cost.main_share <= cost.cpu_share
    assert cost.commands_per_s > 0 and cost.prompts_per_s > 0


@pytest.mark.slow
def test_a_crowd_asks_the_store_for_as_much_as_was_recorded(
    settings: Settings, s3_login: S3Login
) -> None:
    asked = [Asked(1.0 + n / 100, "GET", "/b/run/control/000000.json", 0) for n in range(6)]
    for batch in range(2):
        asked += [
            Asked(2.0, "GET", "/b/run/plan/prompts/000000.ab.jsonl.zst", 0),
            Asked(2.0, "GET", f"/b/run/commits/000000/{batch}.json", 0),
            Asked(3.0, "PUT", f"/b/run/data/000000/{batch}/x.jsonl.zst", 5000 + batch * 1000),
            Asked(3.0, "PUT", f"/b/run/commits/000000/{batch}.json", 400),
        ]

    mix = mix_of(asked, 0.0, 4.0)
    cost = measure_store(settings, mix, num_workers=4, batches_per_s=4.0, seconds=2.0)

    assert (mix.requests_per_batch, mix.puts_per_batch, mix.looks_per_s) == (5.0, 2.0, 1.0)
    assert (mix.data_bytes, mix.commit_bytes) == (5500, 400)
    assert cost.puts_per_s == pytest.approx(2 * cost.batches_per_s)
    assert 0 < cost.batches_per_s <= 4.5
    assert cost.cpu_share > 0


def make_cost(num_workers: int, prompts_per_s: float, law: Law, **changed: float) -> Cost:
    """Of a crowd that keeps to the law exactly."""
    share = num_workers * (law.per_worker + law.per_prompt * prompts_per_s)
    cost = Cost(
        crowd=Crowd(num_workers, prompts_per_s),
        seconds=10.0,
        cpu_share=share,
        main_share=share,
        commands_per_s=num_workers * 10.0,
        pieces_per_s=num_workers * 7.0,
        prompts_per_s=num_workers * prompts_per_s,
        sent_bytes_per_s=1.0,
        in_bytes_per_s=1.0,
        out_bytes_per_s=1.0,
        memory_mb=10.0,
        clients_mb=1.0,
        lag_s=0.0,
        answer_p50_ms=0.1,
        answer_p99_ms=1.0,
        observer_ms=2.0,
        num_errors=0,
        usec_by_command={},
    )
    return dataclasses.replace(cost, **changed)  # type: ignore[arg-type]


def found(costs: list[Cost]) -> Found:
    """These crowds, and next to nothing else."""
    pieces = [
        *RedisParser(0).feed(packed("EVALSHA", "x", 5, *"plijs", "claim", "0/b", "a", 15000), 0.0),
        *RedisParser(1).feed(packed("EVALSHA", "x", 5, *"plijs", "renew", "0/b", "a", 15000), 1.0),
    ]
    store = StoreCost(200, 2.5, 2.5, 110.0, 5.0, 0.1, 2.0, 5.0)
    mix = Mix(1, 5.0, 2.0, 1000, 100, 0.5)
    return Found(make_tape(pieces, 2.0, 1.0), mix, 900.0, 1e5, costs, [store])


def test_the_limit_is_where_the_sum_of_workers_and_prompts_fills_the_thread() -> None:
    true = Law(per_worker=100e-6, per_prompt=50e-6, worst_miss=0.0)
    costs = [make_cost(200, 0.8, true), make_cost(50, 0.8, true), make_cost(200, 40.0, true)]
    late = make_cost(200, 160.0, true, lag_s=9.0, main_share=0.01)  # says nothing
    unread = make_cost(200, 80.0, true, in_bytes_per_s=0.5, main_share=0.01)  # nor does this

    law = law_of([*costs, late, unread])
    figures = {f.figure: f.value for f in figures_of(found([*costs, late, unread]))}

    assert law is not None
    assert law.per_worker == pytest.approx(100e-6)
    assert law.per_prompt == pytest.approx(50e-6)
    assert figures["replay.max_workers_one_redis"] == pytest.approx(0.7 / (100e-6 + 0.8 * 50e-6))


def test_what_too_few_crowds_tell_is_left_out() -> None:
    late = make_cost(200, 0.8, Law(1e-4, 1e-4, 0.0), lag_s=9.0)

    figures = {figure.figure for figure in figures_of(found([late]))}

    assert "replay.max_workers_one_redis" not in figures
    assert "replay.redis_most_ops_per_s" not in figures
    assert "replay.redis_cpu_share" in figures


INFLIGHT = "dflash:inflight:replay"
