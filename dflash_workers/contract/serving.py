"""Which drafter a run's engines serve: an append-only log in S3, whose last entry holds.

Written by the promoter (promotion/), followed by nodes. An entry says what every engine serves from
then on, and, while a trial is on, what one engine serves instead. So a death between any two steps
leaves a fleet that comes to one drafter by itself: that of the last entry. `serving.json` is a copy
of the last entry, for people and their scripts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from dflash_workers.contract.errors import Conflict, FleetError, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import SCHEMA_VERSION, Json
from dflash_workers.contract.store import Store

log = logging.getLogger(__name__)

NONE = ""  # in a drafter's place: engines decode without one

TRY, PROMOTE, REJECT, WITHDRAW = "try", "promote", "reject", "withdraw"


@dataclass(frozen=True, slots=True)
class Trial:
    """A drafter on one engine only."""

    drafter: str
    slot: str  # of the worker at that engine


@dataclass(frozen=True, slots=True)
class ServingEntry:
    """`serving/<n>.json`."""

    schema: int
    number: int
    action: str  # try | promote | reject | withdraw
    drafter: str  # what the fleet serves from here on; NONE: no drafter
    trial: Trial | None
    at: float  # seconds since the epoch
    by: str
    evidence: Json = field(default_factory=dict)

    def wanted(self, slot: str) -> str:
        """What the engine of a slot is to serve."""
        return self.trial.drafter if self.trial and self.trial.slot == slot else self.drafter


_BEFORE_ALL = ServingEntry(SCHEMA_VERSION, -1, WITHDRAW, NONE, None, 0.0, "")


class ServingLog:
    """One run's. Remembers what it has read: a look costs one GET."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._last = _BEFORE_ALL

    def last(self) -> ServingEntry:
        """The entry that holds as of now."""
        for entry in self._after(self._last.number):
            self._last = entry
        return self._last

    def history(self) -> list[ServingEntry]:
        """All of them, the oldest first."""
        return list(self._after(-1))

    def append(
        self,
        before: ServingEntry,
        action: str,
        drafter: str,
        *,
        by: str,
        trial: Trial | None = None,
        evidence: Json | None = None,
    ) -> ServingEntry:
        """Decide, on what `before` said. Raises Conflict where somebody else decided meanwhile."""
        entry = ServingEntry(
            SCHEMA_VERSION,
            before.number + 1,
            action,
            drafter,
            trial,
            time.time(),
            by,
            evidence or {},
        )
        try:
            self._store.put_new(self._keys.serving(entry.number), dump(entry))
        except Conflict as error:
            raise Conflict("another promotion decided meanwhile: look at `drafters`") from error
        self._last = entry
        try:
            self._store.replace(self._keys.serving_now, dump(entry))
        except FleetError as error:  # the decision stands: nodes read the log
            log.warning("the copy for people is behind: %s", error)
        return entry

    def _after(self, number: int) -> Iterator[ServingEntry]:
        for next_number in count(number + 1):
            try:
                body = self._store.get(self._keys.serving(next_number))
            except Missing:
                return
            yield load(ServingEntry, body)
