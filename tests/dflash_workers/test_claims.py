"""The holes that an earlier wording of the claims had, each closed."""

from __future__ import annotations

import time

import pytest
import redis

from dflash_workers.claims import Claim, Claims, Renewal, Timing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import BatchMessage
from dflash_workers.holds import Holds, News

TIMING = Timing(lease_ms=400, handover_ms=200)
QUEUE = "generate.test-claims"


@pytest.fixture
def claims(hints: Hints) -> Claims:
    return Claims(hints.redis, hints, TIMING)


@pytest.fixture
def message(hints: Hints) -> BatchMessage:
    return BatchMessage("run", 3, "b" * 16)


class Sets:
    """What stands in Redis about one batch, read without the code under test."""

    def __init__(self, client: redis.Redis, hints: Hints, message: BatchMessage) -> None:
        self.client, self.keys, self.message = client, hints.keys, message
        self.name = batch_name(message.segment, message.batch)

    def lease(self) -> str:
        holder = self.client.get(self.keys.lease("run", self.name)) or b""
        return str(holder, "ascii") if isinstance(holder, bytes) else holder

    def is_pending(self) -> bool:
        return self.client.zscore(self.keys.pending("run"), self.name) is not None

    def deadline(self) -> float | None:
        return self.client.zscore(self.keys.inflight("run"), self.name)


@pytest.fixture
def sets(redis_client: redis.Redis, hints: Hints, message: BatchMessage) -> Sets:
    return Sets(redis_client, hints, message)


def claimed(claims: Claims, message: BatchMessage) -> Claim:
    claim = claims.claim(message)
    assert claim is not None
    return claim


def begin(claims: Claims, verb: str, claim: Claim) -> int:
    """Only the first step of a hand-over, as by a process that then falls asleep."""
    args = (claim.attempt,) if verb == "release" else (50,)
    name = claim.name if verb == "release" else ""
    found = claims._call("run", verb, name, *args, TIMING.handover_ms)
    return found if isinstance(found, int) else found[0]


def test_a_batch_is_held_by_one_attempt_at_a_time(
    claims: Claims, hints: Hints, message: BatchMessage, sets: Sets
) -> None:
    hints.offer([message], QUEUE)

    first, second = claims.claim(message), claims.claim(message)

    assert first is not None
    assert second is None
    assert sets.lease() == first.attempt
    assert not sets.is_pending()
    assert sets.deadline() is not None


def test_lease_and_deadline_lapse_together(
    claims: Claims, message: BatchMessage, sets: Sets
) -> None:
    claimed(claims, message)

    while sets.lease():
        assert claims.reap("run", QUEUE) == [] or not sets.lease()
        time.sleep(0.01)

    assert sets.is_pending() or claims.reap("run", QUEUE) == [sets.name]


def test_a_drained_batch_is_not_eaten_while_its_lease_stands(
    claims: Claims, message: BatchMessage, sets: Sets, monkeypatch: pytest.MonkeyPatch, hints: Hints
) -> None:
    leases_at_publish = []
    send = type(hints).give_back

    def give_back(self: Hints, message: BatchMessage, queue: str) -> None:
        leases_at_publish.append(sets.lease())
        send(self, message, queue)

    monkeypatch.setattr(type(hints), "give_back", give_back)
    claim = claimed(claims, message)

    assert claims.release(claim, QUEUE)

    assert leases_at_publish == [""]
    assert sets.is_pending()
    assert claims.claim(message) is not None


def test_a_claim_between_publish_and_pending_keeps_the_batch(
    claims: Claims, message: BatchMessage, sets: Sets
) -> None:
    deadline_ms = begin(claims, "release", claimed(claims, message))

    second = claimed(claims, message)
    moved = claims._call("run", "settle", sets.name, deadline_ms)

    assert moved == 0
    assert sets.lease() == second.attempt
    assert not sets.is_pending()


def test_a_sleeping_reaper_moves_nothing_that_was_claimed_since(
    claims: Claims, message: BatchMessage, sets: Sets
) -> None:
    dead = claimed(claims, message)
    time.sleep(TIMING.lease_ms / 1000 + 0.05)
    deadline_ms = begin(claims, "reap", dead)

    second = claimed(claims, message)
    assert claims._call("run", "settle", sets.name, deadline_ms) == 0
    assert claims.release(second, QUEUE)
    third = claimed(claims, message)
    assert claims._call("run", "settle", sets.name, deadline_ms) == 0

    assert sets.lease() == third.attempt
    assert not sets.is_pending()


def test_a_crash_in_the_middle_of_a_hand_over_is_mended(
    claims: Claims, message: BatchMessage, sets: Sets, hints: Hints
) -> None:
    begin(claims, "release", claimed(claims, message))

    assert claims.reap("run", QUEUE) == []
    time.sleep(TIMING.handover_ms / 1000 + 0.05)

    assert claims.reap("run", QUEUE) == [sets.name]
    assert sets.is_pending()
    assert hints.num_queued(QUEUE) >= 1


def test_only_the_holder_releases(claims: Claims, message: BatchMessage, sets: Sets) -> None:
    stalled = claimed(claims, message)
    time.sleep(TIMING.lease_ms / 1000 + 0.05)
    holder = claimed(claims, message)

    assert not claims.release(stalled, QUEUE)

    assert sets.lease() == holder.attempt
    assert not sets.is_pending()


def test_a_renewal_tells_held_from_taken_again_from_lost(
    claims: Claims, message: BatchMessage
) -> None:
    claim = claimed(claims, message)

    assert claims.renew(claim) is Renewal.HELD
    time.sleep(TIMING.lease_ms / 1000 + 0.05)
    assert claims.renew(claim) is Renewal.AGAIN
    time.sleep(TIMING.lease_ms / 1000 + 0.05)
    claimed(claims, message)
    assert claims.renew(claim) is Renewal.LOST


def test_clearing_leaves_anothers_lease_but_makes_that_holder_look(
    claims: Claims, message: BatchMessage, sets: Sets
) -> None:
    late = claimed(claims, message)
    time.sleep(TIMING.lease_ms / 1000 + 0.05)
    holder = claimed(claims, message)

    claims.clear(late)

    assert sets.lease() == holder.attempt
    assert sets.deadline() is None
    assert claims.renew(holder) is Renewal.AGAIN


def test_a_cleared_batch_leaves_nothing_behind(
    claims: Claims, message: BatchMessage, redis_client: redis.Redis, hints: Hints
) -> None:
    hints.offer([message], QUEUE)
    claim = claimed(claims, message)
    redis_client.hset(hints.keys.journal("run", claim.name), "k:0", "row")
    redis_client.hset(hints.keys.suspects("run", claim.name), "death:1", "whose")

    claims.clear(claim)

    assert list(redis_client.scan_iter(f"{hints.keys.prefix}*")) == []


def test_what_is_given_back_is_next_in_line(
    claims: Claims, hints: Hints, message: BatchMessage, sets: Sets
) -> None:
    queue = f"{QUEUE}-{hints.keys.prefix}"
    hints.offer([BatchMessage("run", 3, f"{i:016x}") for i in range(3)], queue)
    claim = claimed(claims, message)

    claims.release(claim, queue)

    with hints.app.connection_for_read() as connection:
        first = connection.SimpleQueue(queue).get(block=True, timeout=5)
        assert first.payload[1]["batch"] == message.batch


def test_an_unanswered_renewal_makes_the_next_one_count_as_taken_again(
    hints: Hints, message: BatchMessage, claims: Claims, redis_client: redis.Redis
) -> None:
    holds = Holds(claims)
    holds.start()

    with holds.holding(claimed(claims, message)) as hold:
        hold.in_doubt = True
        assert hold.wait(2) is News.AGAIN
        assert hold.wait(0.3) is None
    holds.stop(1)


def test_a_hold_hears_that_it_was_lost(
    hints: Hints, message: BatchMessage, claims: Claims, redis_client: redis.Redis
) -> None:
    holds = Holds(claims)
    holds.start()

    with holds.holding(claimed(claims, message)) as hold:
        redis_client.set(hints.keys.lease("run", hold.claim.name), "another", px=5000)
        assert hold.wait(2) is News.LOST
    holds.stop(1)
