from __future__ import annotations

import pytest

from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.serving import (
    NONE,
    PROMOTE,
    REJECT,
    TRY,
    ServingEntry,
    ServingLog,
    Trial,
)
from dflash_workers.contract.store import Store


def test_a_fleet_nobody_promoted_anything_in_serves_no_drafter(store: Store) -> None:
    assert ServingLog(store, "maths").last().wanted("gpu0") == NONE


def test_a_trial_is_one_engines_alone(store: Store) -> None:
    log = ServingLog(store, "maths")
    entry = log.append(log.last(), PROMOTE, "old", by="a")
    log.append(entry, TRY, "old", by="a", trial=Trial("new", "gpu1"))

    seen = ServingLog(store, "maths").last()

    assert (seen.wanted("gpu0"), seen.wanted("gpu1")) == ("old", "new")


def test_a_decision_that_another_has_overtaken_is_refused(store: Store) -> None:
    one, other = ServingLog(store, "maths"), ServingLog(store, "maths")
    before = other.last()
    one.append(one.last(), PROMOTE, "fast", by="one")

    with pytest.raises(Conflict, match="another promotion"):
        other.append(before, PROMOTE, "slow", by="other")

    assert other.last().drafter == "fast"


def test_the_history_stays_and_the_copy_for_people_is_its_last_entry(store: Store) -> None:
    log = ServingLog(store, "maths")
    entry = log.append(log.last(), TRY, NONE, by="a", trial=Trial("new", "gpu1"))
    log.append(entry, REJECT, NONE, by="a", evidence={"why": "slower"})

    history = ServingLog(store, "maths").history()

    assert [e.action for e in history] == [TRY, REJECT]
    assert load(ServingEntry, store.get(RunKeys("maths").serving_now)) == history[-1]
