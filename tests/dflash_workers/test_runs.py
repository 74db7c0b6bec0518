"""A run's orders, asked by many threads at once."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from dflash_workers.contract.control import Action, Control, RunState
from dflash_workers.contract.errors import StoreUnavailable
from dflash_workers.contract.store import Store
from dflash_workers.runs import Orders


class SlowControl:
    """As much of a control log as is asked; each look takes a while."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.now = RunState.ACTIVE
        self.is_away = False

    def state(self) -> RunState:
        self.num_looks += 1
        found = self.now  # as of the look's begin
        time.sleep(0.05)
        if self.is_away:
            raise StoreUnavailable("away")
        return found


def test_threads_that_ask_at_once_share_a_look() -> None:
    control = SlowControl()
    orders = Orders(cast(Control, control))
    threads = [threading.Thread(target=orders.state) for _ in range(32)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 <= control.num_looks <= 4


def test_no_answer_is_older_than_its_question() -> None:
    control = SlowControl()
    orders = Orders(cast(Control, control))
    earlier = threading.Thread(target=orders.state)
    earlier.start()
    time.sleep(0.02)  # its look has begun

    control.now = RunState.PAUSED

    assert orders.state() is RunState.PAUSED
    earlier.join()


def test_a_look_that_failed_serves_nobody() -> None:
    control = SlowControl()
    orders = Orders(cast(Control, control))
    control.is_away = True
    with pytest.raises(StoreUnavailable):
        orders.state()

    control.is_away, control.now = False, RunState.CANCELLED

    assert orders.state() is RunState.CANCELLED


def test_an_order_counts_at_once(store: Store) -> None:
    orders, control = Orders(Control(store, "run")), Control(store, "run")
    seen = [orders.state()]

    for action in (Action.PAUSE, Action.RESUME, Action.CANCEL):
        control.order(action)
        seen.append(orders.state())

    assert [state.value for state in seen] == ["active", "paused", "active", "cancelled"]
