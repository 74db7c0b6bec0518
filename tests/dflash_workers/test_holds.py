"""What a holder hears while it works, and that nothing is renewed once it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from dflash_workers.claims import Claim, Claims, Timing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import BatchMessage
from dflash_workers.holds import Holds, News

TIMING = Timing(lease_ms=400, handover_ms=200)


@pytest.fixture
def holds(hints: Hints) -> Iterator[Holds]:
    holds = Holds(Claims(hints.redis, hints, TIMING))
    holds.start()
    yield holds
    holds.stop(2)


@pytest.fixture
def claim(hints: Hints) -> Claim:
    claim = Claims(hints.redis, hints, TIMING).claim(BatchMessage("run", 0, "b"))
    assert claim
    return claim


def test_a_claim_outlives_its_lease_while_it_is_held_and_no_longer(
    holds: Holds, claim: Claim, hints: Hints, redis_client: redis.Redis
) -> None:
    lease = hints.keys.lease("run", batch_name(0, "b"))

    with holds.holding(claim) as hold:
        time.sleep(1)
        while_held = redis_client.get(lease)
        heard = hold.wait(0)
    time.sleep(0.6)

    assert while_held == claim.attempt.encode()
    assert heard is None
    assert redis_client.get(lease) is None


def test_a_holder_hears_that_another_has_the_batch(
    holds: Holds, claim: Claim, hints: Hints, redis_client: redis.Redis
) -> None:
    with holds.holding(claim) as hold:
        redis_client.set(hints.keys.lease("run", batch_name(0, "b")), "another", px=60_000)

        assert hold.wait(2) is News.LOST


def test_a_holder_hears_that_its_claim_had_lapsed_and_is_its_again(
    holds: Holds, claim: Claim, hints: Hints, redis_client: redis.Redis
) -> None:
    lease = hints.keys.lease("run", batch_name(0, "b"))
    with holds.holding(claim) as hold:
        redis_client.delete(lease)

        assert hold.wait(2) is News.AGAIN
        assert redis_client.get(lease) == claim.attempt.encode()


def test_all_holders_are_told_what_concerns_all_and_a_runs_holders_what_concerns_it(
    holds: Holds, claim: Claim
) -> None:
    other = Claim(BatchMessage("other", 0, "b"), "attempt")

    with holds.holding(claim) as first, holds.holding(other) as second:
        holds.tell(News.CLOSING)
        holds.cancel("run")
        holds.drain()

        heard = [[hold.wait(0) for _ in range(3)] for hold in (first, second)]

    assert heard[0] == [News.CLOSING, News.CANCELLED, News.DRAIN]
    assert heard[1][:2] == [News.CLOSING, News.DRAIN]


def test_who_holds_a_batch_only_once_the_process_leaves_is_told_at_once(
    holds: Holds, claim: Claim
) -> None:
    holds.drain()

    with holds.holding(claim) as hold:
        assert hold.wait(0) is News.DRAIN
    assert len(holds) == 0
