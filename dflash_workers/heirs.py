"""Batches of dead workers, taken up at once, beside Celery's slots.

Called by the sweep (vitals) with what it has just given back. The slots of a full worker are taken
for minutes, and so are every other worker's, so that a batch would wait for one of them however
first in line its hint is. An heir works on it as a slot would (tasks). The hint stands as before:
whoever claims first has the batch, and a worker that dies with its heirs loses no more than its
leases.
"""

from __future__ import annotations

import threading
import time

from dflash_workers.contract.keys import parse_batch_name
from dflash_workers.contract.records import BatchMessage, encode
from dflash_workers.tasks import take
from dflash_workers.worksite import Site

MAX_HEIRS = 2  # at once: a dead worker's many batches are for all who live


class Heirs:
    """One process'. Used from one thread."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._threads: list[threading.Thread] = []

    def take_up(self, run: str, name: str) -> None:
        """Work on the batch of that name, unless this worker takes none or has its heirs."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_HEIRS or not self._takes_work():
            return
        facts = encode(BatchMessage(run, *parse_batch_name(name)))
        heir = threading.Thread(target=take, args=(facts, self._site), name="heir", daemon=True)
        heir.start()
        self._threads.append(heir)

    def join(self, timeout_s: float) -> None:
        """Until those at work have handed over, or for so long."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _takes_work(self) -> bool:
        return not (self._site.holds.draining.is_set() or self._site.gate.why_closed())
