"""Pause, resume, cancel: what somebody ordered for a run, in an append-only log in S3.

Written by the producer's verbs, read by workers (before a batch is claimed) and by whoever sends
hints. In S3 and not in Redis, so that a flush doesn't set a paused run going. A paused run's hints
are dropped by who receives them; `resume` sends them again.
"""

from __future__ import annotations

import time
from enum import Enum
from itertools import count

from dflash_workers.contract.errors import Conflict, Corrupt, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import SCHEMA_VERSION, ControlEntry
from dflash_workers.contract.store import Store


class RunState(Enum):
    """Whether a run's batches are to be worked on."""

    ACTIVE = "active"
    PAUSED = "paused"  # what is claimed goes on to its end, nothing new is claimed
    CANCELLED = "cancelled"  # for good; what is claimed is given up


class Action(Enum):
    """What may be ordered."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


_STATE_AFTER = {
    Action.PAUSE: RunState.PAUSED,
    Action.RESUME: RunState.ACTIVE,
    Action.CANCEL: RunState.CANCELLED,
}


class Control:
    """One run's orders. Remembers what it has read: a look costs one GET."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._next = 0
        self._state = RunState.ACTIVE

    def state(self) -> RunState:
        """The state as of now."""
        for number in count(self._next):
            try:
                body = self._store.get(RunKeys(self._run).control(number))
            except Missing:
                break
            self._state = _STATE_AFTER[_action(load(ControlEntry, body).action)]
            self._next = number + 1
        return self._state

    def order(self, action: Action) -> RunState:
        """Give an order; return the state that holds then. Safe to repeat.

        Raises Conflict for a cancelled run, unless the order is to cancel.
        """
        while True:
            state = self.state()
            if state is RunState.CANCELLED and action is not Action.CANCEL:
                raise Conflict(f"run {self._run!r} is cancelled: start another run")
            if state is _STATE_AFTER[action]:
                return state
            entry = ControlEntry(SCHEMA_VERSION, self._next, action.value, time.time())
            try:
                self._store.put_new(RunKeys(self._run).control(self._next), dump(entry))
            except Conflict:
                continue  # somebody else was first: read that, then decide again


def _action(name: str) -> Action:
    try:
        return Action(name)
    except ValueError as error:
        raise Corrupt(f"control log: unknown action {name!r}") from error
