"""One trainer has a name; whoever is dead has none."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import pytest

from dflash_workers.contract.errors import Conflict, FleetError, LeaseLost
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from trainer.online import holding
from trainer.online.holding import Hold

PREFIX = "r/train/one/"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a test's length, also in the processes that are forked."""
    for name, seconds in (("BEAT_S", 0.2), ("SILENCE_S", 4.0), ("LOOK_S", 0.05)):
        monkeypatch.setattr(holding, name, seconds)


def pay_no_heed(error: FleetError) -> None:
    """Nothing to do."""


@dataclass
class Other:
    """Another process, which has the name until it hears that it has not."""

    process: BaseProcess
    has_left: Event


def hold(settings: Settings, ready: Event, has_left: Event) -> None:
    lost: list[FleetError] = []
    with Hold(open_store(settings), PREFIX, lost.append):
        ready.set()
        while not lost:
            time.sleep(0.05)
    if isinstance(lost[0], LeaseLost) and "taken over by process" in str(lost[0]):
        has_left.set()


@pytest.fixture
def other(settings: Settings) -> Iterator[Other]:
    context = multiprocessing.get_context("fork")
    ready, has_left = context.Event(), context.Event()
    process = context.Process(target=hold, args=(settings, ready, has_left))
    process.start()
    assert ready.wait(30)
    yield Other(process, has_left)
    process.kill()
    process.join()


def test_a_second_trainer_of_a_name_is_refused_and_told_who_the_first_one_is(store: Store) -> None:
    with Hold(store, PREFIX, pay_no_heed), pytest.raises(Conflict) as refused:
        Hold(store, PREFIX, pay_no_heed).__enter__()

    assert f"{PREFIX[:-1]} is being trained by process {os.getpid()} on" in str(refused.value)


def test_a_name_is_free_at_once_after_a_goodbye_and_another_name_always_is(store: Store) -> None:
    with Hold(store, PREFIX, pay_no_heed), Hold(store, "r/train/two/", pay_no_heed):
        pass
    began = time.monotonic()

    with Hold(store, PREFIX, pay_no_heed):
        assert time.monotonic() - began < holding.SILENCE_S


def test_the_name_of_a_process_that_was_killed_on_this_host_is_free_without_waiting(
    store: Store, other: Other
) -> None:
    other.process.kill()
    other.process.join()
    began = time.monotonic()

    with Hold(store, PREFIX, pay_no_heed):
        assert time.monotonic() - began < holding.SILENCE_S


def test_a_holder_that_stands_still_is_taken_over_from_and_leaves_when_it_wakes(
    store: Store, other: Other
) -> None:
    os.kill(other.process.pid or 0, signal.SIGSTOP)

    with Hold(store, PREFIX, pay_no_heed):
        os.kill(other.process.pid or 0, signal.SIGCONT)
        assert other.has_left.wait(30)
        with pytest.raises(Conflict):
            Hold(store, PREFIX, pay_no_heed).__enter__()
