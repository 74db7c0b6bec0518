"""promoter.py, trial.py, following.py: whatever happens, the fleet comes to one drafter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from dflash_workers.contract.errors import Conflict, NotEnough, StoreUnavailable
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.serving import PROMOTE, REJECT, TRY, ServingLog, Trial
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.node import following
from dflash_workers.node.following import Drafting
from dflash_workers.promotion import lease, promoter, trial
from dflash_workers.promotion.lease import PromoterLease
from dflash_workers.promotion.observing import Fleet
from dflash_workers.promotion.promoter import Patience, Promoter
from dflash_workers.promotion.verdict import Rule
from dflash_workers.server import EngineConfig
from tests.dflash_workers.promotion.machines import Machines

RULE = Rule(max_requests=1500, num_looks=5, window_s=0.06, min_windows=6, settle_s=0.1, max_s=60)
SPEEDS = {"": 20_000.0, "good": 30_000.0, "slow": 15_000.0, "same": 20_100.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.03)
    monkeypatch.setattr(promoter, "POLL_S", 0.03)
    monkeypatch.setattr(trial, "POLL_S", 0.03)


@pytest.fixture
def open_machines(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> Iterator[Callable[..., Machines]]:
    entered: list[Machines] = []

    def begin(**options: Any) -> Machines:
        log, keys = ServingLog(store, settings.run), RedisKeys(settings.redis_prefix)
        machines = Machines(log, redis_client, keys, settings.run, SPEEDS, **options)
        entered.append(machines.__enter__())
        return machines

    yield begin
    for machines in entered:
        machines.__exit__()


@pytest.fixture
def make_promoter(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> Callable[..., Promoter]:
    keys, run = RedisKeys(settings.redis_prefix), settings.run

    def make(**patience: float) -> Promoter:
        return Promoter(
            ServingLog(store, run),
            Fleet(redis_client, keys, "Redis"),
            partial(PromoterLease, redis_client, keys, run, "Redis"),
            run=run,
            patience=Patience(**({"change_s": 60.0, "follow_s": 5.0} | patience)),
            say=lambda text: None,
        )

    return make


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def actions(store: Store, run: str) -> list[str]:
    return [entry.action for entry in ServingLog(store, run).history()]


def test_a_faster_drafter_is_served_by_all_changed_one_at_a_time(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
) -> None:
    machines = open_machines()

    decision = make_promoter().promote("good", RULE)

    assert decision.is_promoted, decision.why
    assert machines.serving() == {"good"}
    assert machines.most_down == 1
    assert actions(store, settings.run) == [TRY, PROMOTE]
    evidence = decision.entry.evidence
    assert 0.3 < evidence["gain"]["mean"] < 0.7  # 30,000 over 20,000
    assert evidence["accept_length"] == 1.5


@pytest.mark.parametrize("drafter", ["slow", "same"])
def test_one_that_is_not_faster_is_withdrawn_whatever_it_accepts(
    drafter: str,
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
) -> None:
    machines = open_machines()

    decision = make_promoter().promote(drafter, RULE, slot="gpu1")

    assert not decision.is_promoted
    assert actions(store, settings.run) == [TRY, REJECT]
    assert {slot for slot, served in machines.served if served == drafter} == {"gpu1"}
    until(lambda: machines.serving() == {""} and len(machines.served) >= 4)


def test_one_that_can_not_be_loaded_or_crashes_is_refused_by_name(
    open_machines: Callable[..., Machines], make_promoter: Callable[..., Promoter]
) -> None:
    machines = open_machines(crashing=frozenset({"crashes"}))
    machines.speeds = {**SPEEDS, "crashes": 20_000.0}

    missing = make_promoter().promote("missing", RULE)
    crashes = make_promoter().promote("crashes", RULE)

    assert (missing.is_promoted, missing.why) == (False, "missing can't be loaded")
    assert (crashes.is_promoted, crashes.why) == (False, "its engine ended 2 times")
    until(lambda: machines.serving() == {""})


def test_a_drafter_that_one_other_engine_can_not_serve_is_taken_back_by_all(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
) -> None:
    machines = open_machines(unfit={"gpu2": "good"})

    decision = make_promoter().promote("good", RULE, slot="gpu0")

    assert (decision.is_promoted, decision.why) == (
        False,
        "gpu2 can't serve it: good can't be loaded",
    )
    assert actions(store, settings.run) == [TRY, PROMOTE, REJECT]
    until(lambda: machines.serving() == {""})


def test_an_engine_alone_is_held_against_its_own_past(
    open_machines: Callable[..., Machines], make_promoter: Callable[..., Promoter]
) -> None:
    open_machines(slots=("gpu0",))

    assert make_promoter().promote("good", RULE).is_promoted
    assert not make_promoter().promote("slow", RULE).is_promoted


def test_a_promoter_that_is_told_to_stop_ends_its_trial(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = open_machines()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Watched, "during", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_promoter().promote("good", RULE)

    assert actions(store, settings.run) == [TRY, REJECT]
    until(lambda: machines.serving() == {""})


def test_a_trial_whose_promoter_was_killed_is_over_and_the_next_one_says_so(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "ORPHAN_S", 0.5)
    log = ServingLog(store, settings.run)
    log.append(log.last(), TRY, "", by="the dead", trial=Trial("good", "gpu0"))
    machines = open_machines()

    until(lambda: ("gpu0", "good") in machines.served)
    until(lambda: machines.serving() == {""})
    decision = make_promoter().promote("slow", RULE)

    assert not decision.is_promoted
    assert actions(store, settings.run) == [TRY, REJECT, TRY, REJECT]


def test_two_promotions_at_once_are_one(
    make_promoter: Callable[..., Promoter], settings: Settings, redis_client: redis.Redis
) -> None:
    keys = RedisKeys(settings.redis_prefix)

    with PromoterLease(redis_client, keys, settings.run, "Redis"):
        with pytest.raises(Conflict, match="a promotion of run"):
            make_promoter().promote("good", RULE)
        with pytest.raises(Conflict, match="a promotion of run"):
            make_promoter().order("good")

    assert make_promoter().order("good").drafter == "good"


def test_a_promoter_whose_lease_another_has_taken_decides_nothing_more(
    settings: Settings, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PROMOTER_S", 0.3)
    keys = RedisKeys(settings.redis_prefix)

    with PromoterLease(redis_client, keys, settings.run, "Redis") as slow:
        slow.check()
        redis_client.set(keys.promoter(settings.run), "another's")

        def is_lost() -> bool:
            try:
                slow.check()
            except Conflict:
                return True
            return False

        until(is_lost)

    assert redis_client.get(keys.promoter(settings.run)) == b"another's"


def test_a_fleet_that_does_not_follow_is_told_how(make_promoter: Callable[..., Promoter]) -> None:
    with pytest.raises(NotEnough, match="follows promotions"):
        make_promoter(follow_s=0.1).promote("good", RULE)


def test_an_order_without_a_trial_reaches_every_engine(
    open_machines: Callable[..., Machines], make_promoter: Callable[..., Promoter]
) -> None:
    machines = open_machines()

    make_promoter().order("good")
    until(lambda: machines.serving() == {"good"} and len(machines.served) >= 3)
    make_promoter().order("")
    until(lambda: machines.serving() == {""})


def test_a_drafter_is_not_promoted_because_another_engine_left(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    machines = open_machines(slots=("gpu0", "gpu1"))
    keys = RedisKeys(settings.redis_prefix)

    def leave() -> None:
        until(lambda: ("gpu0", "slow") in machines.served)
        machines.leave("gpu1")
        redis_client.delete(keys.worker("gpu1"), keys.serves("gpu1"))

    leaving = threading.Thread(target=leave)
    leaving.start()
    decision = make_promoter().promote("slow", RULE, slot="gpu0")
    leaving.join()

    assert (decision.is_promoted, decision.why) == (False, "too little to compare it with")


def test_an_s3_that_is_away_for_a_moment_leaves_no_drafter_out(
    open_machines: Callable[..., Machines], make_promoter: Callable[..., Promoter], monkeypatch: Any
) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0.2)
    machines = open_machines(away=2)

    decision = make_promoter().promote("good", RULE)

    assert decision.is_promoted
    assert machines.serving() == {"good"}


def test_a_drafter_that_is_named_again_gets_another_chance(
    open_machines: Callable[..., Machines], make_promoter: Callable[..., Promoter]
) -> None:
    machines = open_machines(unfit={"gpu0": "good"})

    first = make_promoter().promote("good", RULE, slot="gpu0")
    machines.unfit = {}
    again = make_promoter().promote("good", RULE, slot="gpu0")

    assert (first.is_promoted, again.is_promoted) == (False, True)


def test_a_decision_stands_though_its_copy_for_people_can_not_be_written(
    open_machines: Callable[..., Machines],
    make_promoter: Callable[..., Promoter],
    settings: Settings,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_machines()

    def away(*_: object) -> None:
        raise StoreUnavailable("S3 is away")

    monkeypatch.setattr(Store, "replace", away)

    assert make_promoter().promote("good", RULE).is_promoted
    assert actions(store, settings.run) == [TRY, PROMOTE]


def test_early_deaths_far_apart_are_not_two_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(Path("python"), Path("model"), 1)
    drafting = Drafting(lambda _: config, lambda: True)
    drafting.want("good", or_else="", entry=0)

    for steady_s in (600.0, -1.0, 600.0):  # died early, lived long, died early
        drafting.next_config()
        monkeypatch.setattr(following, "STEADY_S", steady_s)
        drafting.next_config()
        monkeypatch.setattr(following, "STEADY_S", -1.0)

    assert drafting.why_not == {}
