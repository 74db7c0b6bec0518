"""What the claims promise across packages: producer, workers, Redis and S3 together."""

from __future__ import annotations

import pytest
import redis

from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.ledger import Ledger
from producer.reconcile import LEASE_S, Reconciler
from tests.producer.campaign import Campaign, prompts, spec_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The reconcilers' clock, which stands unless it is moved: its one number."""
    now_s = [1000.0]
    monkeypatch.setattr("producer.reconcile.time.monotonic", lambda: now_s[0])
    return now_s


def test_reconcile_twice_sends_once(
    store: Store, hints: Hints, redis_client: redis.Redis, settings: Settings, clock: list[float]
) -> None:
    campaign = Campaign(store, hints, spec_of(settings.run))
    held, *lost = campaign.plan(*[prompts(f"p{n}") for n in range(3)])
    claims = Claims(redis_client, hints, Timing())
    first, second = (
        Reconciler(Ledger(store, campaign.run), hints, campaign.queue) for _ in range(2)
    )

    num_sent = []
    for number in range(4):
        num_sent.append(first.look() + second.look())
        if number == 0:
            assert claims.claim(held)
        clock[0] += LEASE_S

    assert num_sent == [0, 2, 0, 0]
    names = {f"{campaign.run}/{batch.segment}/{batch.batch}" for batch in lost}
    assert hints.queued_names(campaign.queue) == names
    assert hints.num_queued(campaign.queue) == 2


def test_a_committed_batch_whose_hint_was_lost_leaves_redis(
    store: Store, hints: Hints, redis_client: redis.Redis, settings: Settings, clock: list[float]
) -> None:
    campaign = Campaign(store, hints, spec_of(settings.run))
    (message,) = campaign.plan(prompts("p"))
    claims = Claims(redis_client, hints, Timing())
    claim = claims.claim(message)
    assert claim
    campaign.commit(message, {"p": "context_length"})

    claims.release(claim, campaign.queue)  # as a sweep does for one that died before it cleared
    redis_client.delete(campaign.queue)
    reconciler = Reconciler(Ledger(store, campaign.run), hints, campaign.queue)
    for _ in range(3):
        reconciler.look()
        clock[0] += LEASE_S
    if hints.num_queued(campaign.queue) and (claim := claims.claim(message)):
        claims.clear(claim)

    assert redis_client.zcard(hints.keys.pending(campaign.run)) == 0
