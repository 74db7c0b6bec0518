"""What ended stays ended: rows of the first writer, kept through a Redis that is away or full."""

from __future__ import annotations

import dataclasses
import random

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dflash_workers.claims import Claim
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import JOURNAL_S
from dflash_workers.contract.records import Answer, BatchMessage
from dflash_workers.journal import Journals

CLAIM = Claim(BatchMessage("run", 0, "b"), "attempt")


def answer(output_ids: list[int], turn: int = 0) -> Answer:
    return Answer(
        turn=turn,
        input_ids=[1, 2, 3],
        output_ids=output_ids,
        segments=[len(output_ids)],
        content="text",
        reasoning_content="thought",
        tool_calls=[],
        finish_reason="stop",
        cached_tokens=0,
        latency_s=0.5,
        seed=7,
    )


@pytest.fixture
def journals(hints: Hints) -> Journals:
    return Journals(hints.redis, hints.keys, hints.where, pause_s=0.2)


def test_the_first_row_wins_whoever_wrote_it(journals: Journals) -> None:
    mine, other = journals.open(CLAIM), journals.open(CLAIM)

    assert mine.keep("k", answer([5])).output_ids == [5]

    assert other.keep("k", answer([6])).output_ids == [5]
    assert other.known("k", 0) is not None


def test_the_next_holder_reads_what_ended_as_ids_and_facts(journals: Journals) -> None:
    journals.open(CLAIM).keep("k", answer([5, 6], turn=2))

    following = journals.open(CLAIM)
    following.load()

    facts = dataclasses.replace(answer([5, 6], turn=2), content="", reasoning_content="")
    assert following.known("k", 2) == facts
    assert following.known("k", 0) is None


def test_a_row_noted_after_the_load_is_found_before_the_turn_starts(journals: Journals) -> None:
    holder, zombie = journals.open(CLAIM), journals.open(CLAIM)
    holder.load()

    zombie.keep("k", answer([5]))

    assert holder.known("k", 0) is None
    found = holder.find("k", 0)
    assert found is not None and found.output_ids == [5]


def test_a_journal_outlives_its_last_row_by_a_day(
    journals: Journals, hints: Hints, redis_client: redis.Redis
) -> None:
    journals.open(CLAIM).keep("k", answer([5]))

    left = redis_client.ttl(hints.keys.journal("run", "0/b"))
    assert JOURNAL_S - 5 <= left <= JOURNAL_S


def test_a_row_of_2300_tokens_takes_at_most_8_kb(
    journals: Journals, hints: Hints, redis_client: redis.Redis
) -> None:
    chance = random.Random(0)
    ids = [min(int(chance.paretovariate(0.35)), 151_000) for _ in range(2300)]  # like words do

    journals.open(CLAIM).keep("k", answer(ids))

    row = redis_client.hget(hints.keys.journal("run", "0/b"), "k:0")
    assert len(row or b"") <= 8192


def test_with_redis_away_rows_are_kept_and_written_once_it_is_back(
    journals: Journals, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    away = redis.Redis(port=1, socket_connect_timeout=0.2, retry=Retry(NoBackoff(), 0))
    journal = dataclasses.replace(journals, redis=away, pause_s=0.0).open(CLAIM)

    assert journal.keep("k", answer([5])).output_ids == [5]
    assert journal.find("other", 0) is None
    assert "journal pauses" in caplog.text
    journal._note = journals.redis.register_script(journal._note.script)
    journal.keep("k2", answer([6]))

    following = journals.open(CLAIM)
    following.load()
    assert {k for k in ("k", "k2") if following.known(k, 0)} == {"k", "k2"}


def test_rows_lost_with_redis_are_noted_again(
    journals: Journals, hints: Hints, redis_client: redis.Redis
) -> None:
    journal = journals.open(CLAIM)
    journal.keep("k", answer([5]))

    redis_client.delete(hints.keys.journal("run", "0/b"))
    journal.load()
    journal.keep("k2", answer([6]))

    assert redis_client.hlen(hints.keys.journal("run", "0/b")) == 2


def test_a_row_of_another_version_is_made_again(
    journals: Journals, hints: Hints, redis_client: redis.Redis
) -> None:
    redis_client.hset(hints.keys.journal("run", "0/b"), "k:0", b"not a row")

    journal = journals.open(CLAIM)
    journal.load()

    assert journal.find("k", 0) is None
    assert journal.keep("k", answer([5])).output_ids == [5]
