"""What ended stays ended, what was half made is gone on with: notes in a Redis that may be away."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dflash_workers.claims import Claim
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import JOURNAL_S
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.records import Answer, BatchMessage
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import start_redis
from dflash_workers.journal import Journal, Journals
from dflash_workers.notes import Partial, digest_of
from tests.batches import cut_off

CLAIM = Claim(BatchMessage("run", 0, "b"), "attempt")
ASKED = [1, 2, 3]


def answer(output_ids: list[int], turn: int = 0, asked: list[int] = ASKED) -> Answer:
    return Answer(
        turn=turn,
        input_ids=asked,
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


def partial(
    output_ids: list[int], turn: int = 0, num_asked: int = 1, asked: list[int] = ASKED
) -> Partial:
    return Partial(digest_of(asked), turn, 7, output_ids, [len(output_ids)], num_asked, 0.5)


def keep(journal: Journal, prompt_key: str, ended: Answer) -> Answer:
    return asyncio.run(journal.keep(prompt_key, ended))


def find(journal: Journal, prompt_key: str, turn: int, asked: list[int]) -> Answer | Partial | None:
    return asyncio.run(journal.find(prompt_key, turn, asked))


def note(journal: Journal, half: Partial) -> None:
    journal.put("k", half)
    journal.flush()


def ids_of(found: Answer | Partial | None) -> list[int]:
    assert found is not None
    return found.output_ids


@pytest.fixture
def journals(hints: Hints) -> Journals:
    return Journals(hints.redis, hints.keys, hints.where, pause_s=0.2, together_s=0)


@pytest.fixture
def client(redis_settings: Settings) -> Iterator[redis.Redis]:
    """One of the test's own, which may lose its way to Redis and find it again."""
    client = open_redis(redis_settings)
    client.set_retry(Retry(NoBackoff(), 0))
    yield client
    client.close()


@pytest.fixture
def own_journals(hints: Hints, client: redis.Redis) -> Journals:
    return Journals(client, hints.keys, hints.where, pause_s=0.0, together_s=0)


def find_again(client: redis.Redis, port: int) -> None:
    client.connection_pool.connection_kwargs["port"] = port
    client.connection_pool.reset()


@pytest.fixture
def port(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


@pytest.fixture
def key(hints: Hints) -> str:
    return hints.keys.journal("run", "0/b")


def test_the_first_row_wins_whoever_wrote_it(journals: Journals) -> None:
    mine, other = journals.open(CLAIM), journals.open(CLAIM)

    assert keep(mine, "k", answer([5])).output_ids == [5]

    assert keep(other, "k", answer([6])).output_ids == [5]
    assert other.known("k", 0, ASKED) is not None


def test_the_next_holder_reads_what_ended_as_ids_and_facts(journals: Journals) -> None:
    keep(journals.open(CLAIM), "k", answer([5, 6], turn=2))

    following = journals.open(CLAIM)
    following.load()

    facts = dataclasses.replace(answer([5, 6], turn=2), content="", reasoning_content="")
    assert following.known("k", 2, ASKED) == facts
    assert following.known("k", 0, ASKED) is None


def test_the_next_holder_goes_on_from_the_whole_output_so_far(journals: Journals) -> None:
    half = dataclasses.replace(partial([5, 6, 7], turn=1), segments=[1, 2])
    note(journals.open(CLAIM), half)

    following = journals.open(CLAIM)
    following.load()

    assert find(following, "k", 1, ASKED) == half
    assert following.known("k", 1, ASKED) is None


@pytest.mark.parametrize("other", [[1, 2], [1, 2, 3, 4], []])
def test_what_was_asked_otherwise_does_not_count(journals: Journals, other: list[int]) -> None:
    journal = journals.open(CLAIM)
    keep(journal, "k", answer([5], turn=0))
    note(journal, partial([6], turn=1))

    following = journals.open(CLAIM)
    following.load()

    assert following.known("k", 0, other) is None
    assert find(following, "k", 0, other) is None
    assert find(following, "k", 1, other) is None
    assert ids_of(keep(following, "k", answer([8], asked=other))) == [8]


def test_a_row_noted_after_the_load_is_found_before_the_turn_starts(journals: Journals) -> None:
    holder, zombie = journals.open(CLAIM), journals.open(CLAIM)
    holder.load()

    keep(zombie, "k", answer([5]))
    note(zombie, partial([6], turn=1))

    assert holder.known("k", 0, ASKED) is None
    assert ids_of(find(holder, "k", 0, ASKED)) == [5]
    assert ids_of(find(holder, "k", 1, ASKED)) == [6]


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_a_partial_never_blocks_or_splices_a_finished_row(
    journals: Journals, redis_client: redis.Redis, key: str, order: tuple[int, ...]
) -> None:
    """Two holders, one of which knows no better: in whatever order their notes arrive."""
    holder, zombie = journals.open(CLAIM), journals.open(CLAIM)
    zombie.load()
    finished = [10, 11]
    steps: list[Callable[[], object]] = [
        lambda: note(holder, partial([10])),
        lambda: note(zombie, partial([20, 21, 22])),
        lambda: keep(holder, "k", answer(finished)),
        lambda: note(zombie, partial([20, 21, 22, 23], num_asked=2)),
    ]

    for step in order:
        steps[step]()

    following = journals.open(CLAIM)
    following.load()
    assert ids_of(find(following, "k", 0, ASKED)) == finished
    assert redis_client.hkeys(key) == [b"k:0"]
    assert ids_of(find(zombie, "k", 0, ASKED)) == finished
    assert ids_of(keep(zombie, "k", answer([20, 21, 22, 23, 24]))) == finished


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_only_a_longer_partial_or_one_of_a_later_asking_replaces_another(
    journals: Journals, order: tuple[int, ...]
) -> None:
    halves = [partial([1]), partial([1, 2, 3]), partial([1, 2]), partial([9], num_asked=2)]

    for i in order:
        note(journals.open(CLAIM), halves[i])

    following = journals.open(CLAIM)
    assert find(following, "k", 0, ASKED) == halves[3]


def test_as_long_a_partial_leaves_the_first(journals: Journals) -> None:
    note(journals.open(CLAIM), partial([1, 2]))
    note(journals.open(CLAIM), partial([1, 9]))

    assert ids_of(find(journals.open(CLAIM), "k", 0, ASKED)) == [1, 2]


def test_notes_that_expired_or_were_cleared_are_made_anew(
    journals: Journals, redis_client: redis.Redis, key: str
) -> None:
    journal = journals.open(CLAIM)
    note(journal, partial([1, 2, 3]))

    redis_client.pexpire(key, 1)
    while redis_client.exists(key):
        pass
    note(journal, partial([1, 2]))

    assert ids_of(find(journals.open(CLAIM), "k", 0, ASKED)) == [1, 2]


@pytest.mark.parametrize("kind", ["finished", "partial"])
def test_a_journal_outlives_its_last_note_by_a_day(
    journals: Journals, redis_client: redis.Redis, key: str, kind: str
) -> None:
    journal = journals.open(CLAIM)
    keep(journal, "k", answer([5], turn=1))
    redis_client.expire(key, 60)

    if kind == "finished":
        keep(journal, "k", answer([5]))
    else:
        note(journal, partial([5]))

    assert JOURNAL_S - 5 <= redis_client.ttl(key) <= JOURNAL_S


def test_a_row_of_2300_tokens_takes_at_most_8_kb_however_long_its_prompt(
    journals: Journals, redis_client: redis.Redis, key: str
) -> None:
    chance = random.Random(0)
    ids = [chance.randrange(151_000) for _ in range(2300)]  # words repeat: theirs are shorter
    asked = [chance.randrange(151_000) for _ in range(20_000)]

    journal = journals.open(CLAIM)
    note(journal, partial(ids, turn=1, asked=asked))
    keep(journal, "k", answer(ids, asked=asked))

    sizes = {field: len(row) for field, row in redis_client.hgetall(key).items()}
    assert sizes.keys() == {b"k:0", b"k:1:partial"}
    assert max(sizes.values()) <= 8192


def test_many_notes_at_once_take_few_round_trips(
    journals: Journals, redis_client: redis.Redis, key: str
) -> None:
    journal = journals.open(CLAIM)
    note(journal, partial([1], turn=99))  # the script is loaded
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]

    for turn in range(48):
        journal.put("k", partial([1, 2], turn))
    threads = [threading.Thread(target=journal.flush) for _ in range(48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert redis_client.hlen(key) == 49
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 1


def test_rows_kept_from_many_threads_all_learn_which_one_stands(journals: Journals) -> None:
    other = journals.open(CLAIM)
    for turn in range(0, 40, 2):
        keep(other, "k", answer([turn], turn))
    journal, stand = journals.open(CLAIM), dict[int, list[int]]()

    def keep_one(turn: int) -> None:
        stand[turn] = keep(journal, "k", answer([-turn - 1], turn)).output_ids

    threads = [threading.Thread(target=keep_one, args=(turn,)) for turn in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert stand == {turn: [turn] if turn % 2 == 0 else [-turn - 1] for turn in range(40)}


def test_with_redis_away_rows_are_kept_and_written_once_it_is_back(
    journals: Journals,
    own_journals: Journals,
    client: redis.Redis,
    port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = own_journals.open(CLAIM)
    cut_off(client)

    assert keep(journal, "k", answer([5])).output_ids == [5]
    note(journal, partial([7], turn=1))
    assert find(journal, "other", 0, ASKED) is None
    assert "journal pauses" in caplog.text
    find_again(client, port)
    keep(journal, "k2", answer([6]))

    following = journals.open(CLAIM)
    following.load()
    assert {k for k in ("k", "k2") if following.known(k, 0, ASKED)} == {"k", "k2"}
    assert ids_of(find(following, "k", 1, ASKED)) == [7]


@pytest.fixture
def full_journals(tmp_path: Path, hints: Hints) -> Iterator[Journals]:
    """Over a Redis of its own that takes no more."""
    child, url = start_redis(tmp_path)
    with child, redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
        yield Journals(client, hints.keys, hints.where, pause_s=0.0, together_s=0)


def test_with_redis_full_the_journal_pauses_and_nothing_is_lost(
    full_journals: Journals, caplog: pytest.LogCaptureFixture
) -> None:
    journal = full_journals.open(CLAIM)

    note(journal, partial([5]))
    assert ids_of(keep(journal, "k", answer([5, 6]))) == [5, 6]
    assert "journal pauses" in caplog.text
    full_journals.redis.config_set("maxmemory", 0)
    journal.flush()

    assert ids_of(find(full_journals.open(CLAIM), "k", 0, ASKED)) == [5, 6]


def test_a_row_written_late_does_not_give_way_to_what_stands(
    journals: Journals, own_journals: Journals, client: redis.Redis, port: int
) -> None:
    """Here the conversation went on from our own."""
    own_journals.pause_s = 0.3
    journal = own_journals.open(CLAIM)
    cut_off(client)
    for turn in (0, 1):  # the second finds the journal paused
        keep(journal, "k", answer([5], turn))
        keep(journals.open(CLAIM), "k", answer([6], turn))

    find_again(client, port)
    time.sleep(0.3)
    keep(journal, "k", answer([7], turn=2))

    for turn in (0, 1):
        assert ids_of(journal.known("k", turn, ASKED)) == [5]
        assert ids_of(find(journals.open(CLAIM), "k", turn, ASKED)) == [6]
    assert ids_of(find(journals.open(CLAIM), "k", 2, ASKED)) == [7]


def test_what_was_lost_with_redis_is_noted_again_by_whoever_has_it(
    journals: Journals, redis_client: redis.Redis, key: str
) -> None:
    note(journals.open(CLAIM), partial([7], turn=2))
    journal = journals.open(CLAIM)
    journal.load()
    note(journal, partial([5], turn=0))
    keep(journal, "k", answer([5, 6], turn=0))
    note(journal, partial([8, 9], turn=1))

    redis_client.delete(key)
    journal.load()

    following = journals.open(CLAIM)
    following.load()
    assert sorted(redis_client.hkeys(key)) == [b"k:0", b"k:1:partial", b"k:2:partial"]
    assert [ids_of(find(following, "k", t, ASKED)) for t in range(3)] == [[5, 6], [8, 9], [7]]


def test_a_look_at_a_redis_that_is_back_writes_what_waits_without_waiting_for_the_pauses_end(
    own_journals: Journals, client: redis.Redis, port: int, redis_client: redis.Redis, key: str
) -> None:
    own_journals.pause_s = 3600
    journal = own_journals.open(CLAIM)
    cut_off(client)
    keep(journal, "k", answer([5]))
    note(journal, partial([7], turn=1))
    while_away = redis_client.hlen(key)

    find_again(client, port)
    journal.load()

    assert while_away == 0
    assert sorted(redis_client.hkeys(key)) == [b"k:0", b"k:1:partial"]


def test_a_journal_that_paused_is_named_once(own_journals: Journals, client: redis.Redis) -> None:
    journal = own_journals.open(CLAIM)
    cut_off(client)
    before = own_journals.take_paused()

    keep(journal, "k", answer([5]))

    taken = [before, own_journals.take_paused(), own_journals.take_paused()]
    assert taken == [set(), {"attempt"}, set()]


@pytest.mark.parametrize("field", ["k:0", "k:0:partial"])
@pytest.mark.parametrize("row", [b"not a row", b"5:not a row", b"{}"])
def test_a_row_of_another_version_is_made_again(
    journals: Journals, redis_client: redis.Redis, key: str, field: str, row: bytes
) -> None:
    redis_client.hset(key, field, row)

    journal = journals.open(CLAIM)
    journal.load()

    assert find(journal, "k", 0, ASKED) is None
    assert keep(journal, "k", answer([5])).output_ids == [5]


def test_an_unreadable_partial_gives_way_to_a_readable_one(
    journals: Journals, redis_client: redis.Redis, key: str
) -> None:
    redis_client.hset(key, "k:0:partial", b"no rank")

    note(journals.open(CLAIM), partial([5]))

    assert ids_of(find(journals.open(CLAIM), "k", 0, ASKED)) == [5]
