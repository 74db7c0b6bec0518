"""Random orders of workers, sweeps, reconciler and faults, on the real Redis, scripts and S3.

What claims_search.py shows of a model in every order is tried here on the code itself. Time passes
when an order says so: leases are removed, and the deadlines of hand-overs are over from the start.
However it went, in the end there is one commit and Redis is empty. The orders are the same in each
run of the tests; INTERLEAVINGS=1000 in the environment tries more of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflash_workers import claims as claims_module
from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.commit import committed_batches
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.ledger import Ledger
from producer.reconcile import LEASE_S, Reconciler
from tests.dflash_workers.claims_book import Batch, Moves, Pauses
from tests.dflash_workers.claims_players import Worker
from tests.producer.campaign import Campaign, prompts, spec_of

HOUR_MS = 3_600_000
MAX_FAULTS = 4
MAX_MOVES = 80  # at random; then everybody does what is to be done
MAX_ROUNDS = 60

ORDERS = hypothesis_settings(
    max_examples=int(os.environ.get("INTERLEAVINGS", "60")),
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

GoThrough = Callable[[st.DataObject], None]


class Keys(NamedTuple):
    """What Redis holds of the batch."""

    pending_since: float | None
    deadline: float | None
    lease: bytes | None
    journal_s: int  # how long it will live; -2: there is none
    num_queued: int


class Order:
    """One batch, from its first hint to its end, one move after the other."""

    def __init__(self, campaign: Campaign, num_prompts: int) -> None:
        hints, planned = campaign.hints, prompts("p", "q")[:num_prompts]
        (message,) = campaign.plan(planned)
        claims = Claims(hints.redis, hints, Timing(lease_ms=HOUR_MS, handover_ms=HOUR_MS))
        self.batch = Batch(campaign, claims, message, planned)
        self.workers = {"A": Worker(self.batch), "B": Worker(self.batch)}
        self.sweeps: dict[str, Pauses] = {}
        ledger = Ledger(campaign.store, campaign.run)
        self.reconciler = Reconciler(ledger, hints, campaign.queue)
        hints.offer([message], campaign.queue)

    def go_through(self, data: st.DataObject) -> None:
        """At random, with some faults, then to the end; the batch is in one place at any time."""
        num_faults, keys = 0, self._look_at_keys()
        for _ in range(MAX_MOVES):
            moves = self._moves(keys)
            if num_faults < MAX_FAULTS and data.draw(st.integers(0, 3)) == 3:
                moves = self._faults(keys)
                num_faults += 1
            if self._is_over(keys):
                break
            name = data.draw(st.sampled_from(sorted(moves)))
            note(name)
            moves[name]()
            keys = self._look_at_keys()
        self._end(keys)

    def _moves(self, keys: Keys) -> Moves:
        """What may come next."""
        batch = self.batch
        moves: Moves = {}
        for name, worker in self.workers.items():
            own = worker.moves(has_hint=keys.num_queued > 0)
            moves |= {f"{name} {what}": move for what, move in own.items()}
        is_overdue = keys.deadline is not None and not batch.book.holder
        for name in ("sweep 1", "sweep 2"):
            if name in self.sweeps:
                moves[f"{name} goes on"] = partial(self._go_on, name)
            elif is_overdue:
                moves[f"{name} reaps"] = partial(self._reap, name)
        if batch.book.holder and batch.book.holder not in self._attempts():
            moves["a dead holder's lease lapses"] = self._lapse
        if batch.late_puts:
            moves["a late PUT arrives"] = self._have_put_arrive
        if not keys.num_queued and keys.deadline is None and not batch.book.commit:
            moves["the reconciler looks"] = self._reconcile
        return moves

    def _faults(self, keys: Keys) -> Moves:
        """What may fail next."""
        faults: Moves = {"Redis is emptied": self._empty_redis}
        for name, worker in self.workers.items():
            faults |= {f"{name} {what}": fault for what, fault in worker.faults().items()}
        if self.batch.book.holder in self._attempts():
            faults["a live holder's lease lapses"] = self._lapse
        for name in self.sweeps:
            faults[f"{name} crashes"] = partial(self.sweeps.pop, name)
        if keys.num_queued:
            faults["a hint is lost"] = self._lose_hint
            faults["a hint is doubled"] = self.batch.send_hint
        return faults

    def _end(self, keys: Keys) -> None:
        """Without faults everybody comes to an end, and so does the batch."""
        for _ in range(MAX_ROUNDS):
            if self._is_over(keys):
                break
            for name in self._moves(keys):
                if move := self._moves(keys).get(name):
                    move()
                    keys = self._look_at_keys()
        while self.batch.late_puts:
            self._have_put_arrive()
        message = self.batch.message
        assert self.batch.find_commit()
        commits = committed_batches(self.batch.campaign.store, message.run)
        assert list(commits) == [(message.segment, message.batch)]
        assert (keys.deadline, keys.lease, keys.num_queued) == (None, None, 0)
        assert keys.pending_since is None or self.batch.book.is_hint_lost
        assert keys.journal_s == -2 or (keys.journal_s > 0 and self.batch.book.has_zombie_row)

    def _is_over(self, keys: Keys) -> bool:
        at_rest = not self.sweeps and all(w.is_at_rest for w in self.workers.values())
        gone = (keys.deadline, keys.lease, keys.num_queued) == (None, None, 0)
        return at_rest and gone and self.batch.book.commit is not None

    def _attempts(self) -> list[str]:
        """Those whose claims somebody renews."""
        return [worker.attempt for worker in self.workers.values() if worker.attempt]

    def _reap(self, name: str) -> None:
        self.sweeps[name] = self.batch.sweep()
        self._go_on(name)

    def _go_on(self, name: str) -> None:
        if next(self.sweeps[name], "over") == "over":
            del self.sweeps[name]

    def _reconcile(self) -> None:
        """As if a lease's time had passed since the last look."""
        if before := self.reconciler.before:
            self.reconciler.before = replace(before, at_s=before.at_s - LEASE_S)
        self.reconciler.look()

    def _have_put_arrive(self) -> None:
        try:
            self.batch.campaign.store.put_new(*self.batch.late_puts.pop())
        except Conflict:
            assert self.batch.book.commit
        assert self.batch.find_commit()

    def _lose_hint(self) -> None:
        self.batch.book.is_hint_lost = self.batch.pop_hint()

    def _lapse(self) -> None:
        """Lease and deadline at once."""
        batch, keys = self.batch, self.batch.campaign.hints.keys
        client, run = batch.campaign.hints.redis, batch.message.run
        client.delete(keys.lease(run, batch.name))
        client.zadd(keys.inflight(run), {batch.name: 1}, xx=True)
        batch.book.holder, batch.book.is_cleared = "", False

    def _empty_redis(self) -> None:
        book, hints = self.batch.book, self.batch.campaign.hints
        keys = list(hints.redis.scan_iter(f"{hints.keys.prefix}*"))
        hints.redis.delete(*keys, *self.batch.queues)
        book.holder, book.is_cleared, book.has_zombie_row = "", False, False
        book.is_hint_lost = True
        book.num_settings += 1
        book.noted.clear()
        for worker in self.workers.values():
            worker.forget_notes()

    def _look_at_keys(self) -> Keys:
        """Read without the code under test: in one place, and held as the book says."""
        batch, keys = self.batch, self.batch.campaign.hints.keys
        run = batch.message.run
        with batch.campaign.hints.redis.pipeline(transaction=False) as pipe:
            pipe.zscore(keys.pending(run), batch.name)
            pipe.zscore(keys.inflight(run), batch.name)
            pipe.get(keys.lease(run, batch.name))
            pipe.ttl(keys.journal(run, batch.name))
            for name in batch.queues:
                pipe.llen(name)
            pending_since, deadline, lease, journal_s, *lengths = pipe.execute()
        assert pending_since is None or lease is None, "held and pending"
        assert pending_since is None or deadline is None, "pending and in flight"
        assert (lease or b"").decode() == batch.book.holder
        return Keys(pending_since, deadline, lease, journal_s, sum(lengths))


@pytest.fixture
def go_through(store: Store, hints: Hints, redis_settings: Settings) -> GoThrough:
    """One order, with a run of its own."""
    numbers = itertools.count()

    def go_through(data: st.DataObject) -> None:
        spec = spec_of(f"{redis_settings.run}-{next(numbers)}")
        Order(Campaign(store, hints, spec), data.draw(st.integers(1, 2))).go_through(data)

    return go_through


@ORDERS
@given(st.data())
def test_every_order_ends_in_one_commit_and_an_empty_redis(
    go_through: GoThrough, data: st.DataObject
) -> None:
    go_through(data)


# What a verb would do wrong: a part of the script, and what stands there instead.
BROKEN = {
    "claim and renew take what another holds": (
        "if holder and holder ~= attempt then return 'lost' end",
        "",
    ),
    "claim leaves the batch in pending": (
        "redis.call('ZREM', pending, batch)\n  redis.call('ZADD', inflight, now_ms + lease_ms",
        "redis.call('ZADD', inflight, now_ms + lease_ms",
    ),
    "renew doesn't tell of a lapse": ("unbroken and 'held' or 'again'", "'held'"),
    "renew doesn't tell of a clear": ("holder and redis.call('ZSCORE', inflight, batch)", "holder"),
    "release leaves the lease": (
        "redis.call('DEL', lease)\n  redis.call('ZADD', inflight, now_ms + handover_ms",
        "redis.call('ZADD', inflight, now_ms + handover_ms",
    ),
    "reap leaves no entry": (
        "'ZADD', inflight, now_ms + handover_ms, name",
        "'ZREM', inflight, name",
    ),
    "settle doesn't look at the deadline": ("~= tonumber(deadline_ms) then", "== 0 then"),
    "clear removes another's lease": (
        "if redis.call('GET', lease) == attempt then redis.call('DEL', lease) end",
        "redis.call('DEL', lease)",
    ),
    "clear leaves the deadline": (
        "redis.call('ZREM', inflight, batch)\n  redis.call('DEL', journal",
        "redis.call('DEL', journal",
    ),
    "clear leaves the journal": ("redis.call('DEL', journal,", "redis.call('DEL',"),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_script_is_noticed(
    broken: str, go_through: GoThrough, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = BROKEN[broken]
    assert right in claims_module._SCRIPT
    monkeypatch.setattr(claims_module, "_SCRIPT", claims_module._SCRIPT.replace(right, wrong))

    @hypothesis_settings(ORDERS, max_examples=500, phases=[Phase.generate])
    @given(st.data())
    def go_through_many(data: st.DataObject) -> None:
        go_through(data)

    with pytest.raises(AssertionError):
        go_through_many()
