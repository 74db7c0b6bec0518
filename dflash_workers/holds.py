"""The claims that this process holds: renewed from one thread, each holder told what happens.

From <- generate (which holds) and the process' drain; to -> generate, as news in each hold's inbox.
The thread has a Redis connection of its own, so that a busy or stuck caller never costs a lease.
When `holding` ends, no renewal of that claim runs or will run: release and clear may follow. An
unanswered renewal may have been the one that took a lapsed lease again, so the next answer after
it counts as "again".
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from dflash_workers.claims import Claim, Claims, Renewal
from dflash_workers.contract.errors import QueueUnavailable

log = logging.getLogger(__name__)


class News(Enum):
    """What a holder may hear while it works."""

    AGAIN = "again"  # claimed anew: read the journal, then ask S3
    LOST = "lost"  # another holds the batch: stop
    CLOSING = "closing"  # this process will leave: start nothing new, let end what can
    DRAIN = "drain"  # it leaves now: give the batch back
    CANCELLED = "cancelled"  # the run is: drop the batch
    ENDED = "ended"  # the holder's own work is over


class Hold:
    """One claim while it is worked on."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.in_doubt = False  # the next renewal counts as "again"
        self.over = False
        self.renewing = threading.Lock()
        self._inbox: queue.SimpleQueue[News] = queue.SimpleQueue()

    def tell(self, news: News) -> None:
        """From any thread, and from a signal handler."""
        self._inbox.put(news)

    def wait(self, timeout_s: float | None = None) -> News | None:
        """The next news; None if there is none in time."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Holds:
    """All holds of this process. `claims` must have a connection that nobody else uses."""

    def __init__(self, claims: Claims) -> None:
        self.draining = threading.Event()  # set: nothing new is claimed, and what is goes back
        self._claims = claims
        self._held: dict[str, Hold] = {}  # by attempt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, name="renew", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the renewing; what is still held lapses."""
        self._stop.set()
        self._thread.join(timeout_s)

    def tell(self, news: News) -> None:
        """Every holder."""
        for hold in list(self._held.values()):
            hold.tell(news)

    def drain(self) -> None:
        """Tell every holder, present and to come, that this process is leaving now."""
        self.draining.set()
        self.tell(News.DRAIN)

    def look_again(self, attempts: set[str]) -> None:
        """Have these, as far as they are held here, do all that is due after a claim."""
        for hold in list(self._held.values()):
            if hold.claim.attempt in attempts:
                hold.tell(News.AGAIN)

    def cancel(self, run: str) -> None:
        """Tell the run's holders that it is cancelled. Safe to repeat."""
        for hold in list(self._held.values()):
            if hold.claim.message.run == run:
                hold.tell(News.CANCELLED)

    def runs(self) -> set[str]:
        """The runs that something is held of."""
        return {hold.claim.message.run for hold in list(self._held.values())}

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def holding(self, claim: Claim) -> Iterator[Hold]:
        """Keep the claim renewed inside the block."""
        hold = Hold(claim)
        self._held[claim.attempt] = hold
        if self.draining.is_set():
            hold.tell(News.DRAIN)
        try:
            yield hold
        finally:
            with hold.renewing:
                hold.over = True
            del self._held[claim.attempt]

    def _renew_all(self) -> None:
        while not self._stop.wait(self._claims.timing.renew_every_s):
            for hold in list(self._held.values()):
                with hold.renewing:
                    if not hold.over:
                        self._renew(hold)

    def _renew(self, hold: Hold) -> None:
        try:
            found = self._claims.renew(hold.claim)
        except QueueUnavailable as error:
            log.warning("claim of %s not renewed: %s", hold.claim.name, error)
            hold.in_doubt = True
            return
        if found is Renewal.LOST:
            hold.tell(News.LOST)
        elif found is Renewal.AGAIN or hold.in_doubt:
            hold.in_doubt = False
            hold.tell(News.AGAIN)
