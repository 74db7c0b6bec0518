from __future__ import annotations

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from producer.api import Run
from producer.enqueue import Claims, name_of, queue_of, read_claims
from producer.reconcile import LEASE_S, View, decide, suspects_of
from tests.producer.conftest import CommitBatch
from tests.producer.test_enqueue import empty_queue, queued, rows

A, B, C = "0/a", "0/b", "0/c"


def view(at_s: float, pending: str = "", inflight: str = "", num_queued: int = 0) -> View:
    return View(
        at_s=at_s,
        uncommitted=frozenset({A, B, C}),
        claims=Claims(frozenset(pending.split()), frozenset(inflight.split())),
        num_queued=num_queued,
    )


def decided(before: View, now: View) -> set[str]:
    return set(decide(suspects_of(before), suspects_of(now)))


def test_what_is_missing_twice_is_offered_again() -> None:
    assert decided(view(0, A, B, 9), view(LEASE_S, A, B, 9)) == {C}


def test_what_is_missing_once_is_left_alone() -> None:
    assert decided(view(0, f"{A} {C}", B, 9), view(LEASE_S, A, B, 9)) == set()
    assert decided(view(0, A, B, 9), view(LEASE_S, f"{A} {C}", B, 9)) == set()


def test_two_looks_within_one_lease_decide_nothing() -> None:
    assert decided(view(0), view(LEASE_S - 0.1)) == set()


def test_what_is_pending_while_the_queue_stays_empty_is_offered_again() -> None:
    assert decided(view(0, f"{A} {B}", C), view(LEASE_S, A, f"{B} {C}")) == {A}
    assert decided(view(0, A, f"{B} {C}", 1), view(LEASE_S, A, f"{B} {C}")) == set()
    assert decided(view(0, A, f"{B} {C}"), view(LEASE_S, A, f"{B} {C}", 1)) == set()


names = st.frozensets(st.sampled_from([A, B, C]))
views = st.builds(
    View,
    at_s=st.floats(0, 60),
    uncommitted=names,
    claims=st.builds(Claims, names, names),
    num_queued=st.integers(0, 1),
)


@given(views, views)
def test_nothing_that_somebody_works_on_is_offered_as_missing(before: View, now: View) -> None:
    again = decided(before, now)

    assert not again & (now.claims.inflight - now.claims.pending)
    assert again <= now.uncommitted | now.claims.pending


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands unless it is moved: its one number."""
    now_s = [1000.0]
    monkeypatch.setattr("producer.reconcile.time.monotonic", lambda: now_s[0])
    return now_s


def test_after_a_flush_exactly_the_batches_without_a_commit_come_back(
    run: Run, redis_client: redis.Redis, commit_batch: CommitBatch, clock: list[float]
) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(20), batch_size=4)
    reconciler = run.reconciler()
    reconciler.ledger.refresh()
    done, *left = reconciler.ledger.uncommitted()
    commit_batch(done)
    redis_client.flushall()

    sent = []
    for _ in range(4):
        sent.append(reconciler.look())
        clock[0] += LEASE_S

    assert sent == [0, 4, 0, 0]
    assert read_claims(run.hints, run.spec.run).pending == set(map(name_of, left))
    assert len(queued(run, redis_client)) == 4


def test_a_lost_hint_is_sent_again_and_a_slow_queue_is_not(
    run: Run, redis_client: redis.Redis, clock: list[float]
) -> None:
    empty_queue(run, redis_client)
    run.enqueue(rows(8), batch_size=4)
    reconciler = run.reconciler()

    def looks(num_looks: int) -> int:
        num_sent = 0
        for _ in range(num_looks):
            num_sent += reconciler.look()
            clock[0] += LEASE_S
        return num_sent

    assert looks(3) == 0
    empty_queue(run, redis_client)
    assert looks(2) == 2
    assert run.hints.num_queued(queue_of(run.spec)) == 2
