"""What the parts of one worker process share: its connections, its engine, its counters.

Made by opening once everything was checked, handed to tasks, generate and vitals. It owns nothing
and decides nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dflash_workers.claims import Claims
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.store import Store
from dflash_workers.engine import Engine
from dflash_workers.gate import Gate
from dflash_workers.holds import Holds
from dflash_workers.journal import Journals
from dflash_workers.poison import Suspects
from dflash_workers.runs import Runs

# What Tally counts: messages.
RECEIVED = "received"
FOREIGN = "foreign"  # of another target, sent home
UNREADABLE = "unreadable"  # not even Celery could tell what they are
DEAD = "dead"  # kept for people, with the reason


class Tally:
    """Counts since the process' start. Safe to share between threads."""

    def __init__(self) -> None:
        self.num_busy = 0  # slots that work on a message, or pause after one
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str) -> int:
        """Count one more; how many there are now."""
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A slot is, inside the block."""
        with self._lock:
            self.num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_busy -= 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


@dataclass(frozen=True, slots=True)
class Habits:
    """How batches are answered here."""

    note_every: int  # ids; see Desk
    max_tool_rounds: int  # per turn


@dataclass(frozen=True, slots=True)
class Site:
    """What this process works with."""

    slot: str
    queue: str
    habits: Habits
    store: Store
    hints: Hints
    claims: Claims
    holds: Holds
    journals: Journals
    suspects: Suspects
    runs: Runs
    engine: Engine
    loop: asyncio.AbstractEventLoop  # where the engine lives
    gate: Gate
    tally: Tally
