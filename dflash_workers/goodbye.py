"""How a worker leaves: told by a signal, a spot notice, or by itself.

Begun by the first SIGTERM, SIGINT, SIGQUIT or SIGHUP: nothing new is taken or started. What runs in
the engine may end within the grace; then it is aborted, noted and handed on, first in line, and
Celery's warm shutdown, which waits for its tasks without limit, finds them ended. A second signal
leaves at once, and so does a process that can't get itself to end: then leases lapse and others
reap. Python runs handlers between two instructions of the main thread, which may hold any lock, so
the handler only sets an event; a thread that was there before does the rest.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from types import FrameType

from dflash_workers.holds import Holds, News
from dflash_workers.notices import Notices

log = logging.getLogger(__name__)

# How a shell, a terminal, Docker and a supervisor say it. Celery's own ways for all but the first
# would kill its threads, which can't be done, or start the process anew.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
HAND_OVER_S = 2.0  # after the grace, for aborting, noting and giving back
# A supervisor tells a node and its workers, and the node tells them once more: the same wish.
ECHO_S = 1.0
_STUCK_S = 15.0  # by then all is handed over, or Redis is away and nothing can be
_CELERY_S = 10.0  # for Celery to notice that its tasks have ended, and for our threads to end
_POLL_S = 0.05


class Goodbye:
    """One process'."""

    def __init__(self, holds: Holds, grace_s: float) -> None:
        self.exit_code = 0
        self.grace_s = grace_s  # for running prompts to end, once it has begun
        self._holds = holds
        self._has_asked = False
        self._begun_s = 0.0
        self._ignored = [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN]  # by nohup
        self._thread = threading.Thread(target=self._see_off, name="goodbye", daemon=True)

    def start(self) -> None:
        """Be ready for it. In the main thread, once Celery has its handlers: its SIGTERM's is
        called for every signal.
        """
        self._thread.start()
        if self._holds.draining.is_set():
            return
        for number in SIGNALS:
            is_ignored = number in self._ignored
            handler = signal.SIG_IGN if is_ignored else signal.getsignal(signal.SIGTERM)
            signal.signal(number, handler)

    def begin(self) -> None:
        """Inside the first signal's handler."""
        self._begun_s = time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self._hear_again)
        self._holds.draining.set()

    def ask(self, why: str, *, left_s: float = math.inf, exit_code: int = 0) -> None:
        """Begin it from any thread, as if by a signal. Does nothing once it has begun."""
        if self._has_asked or self._holds.draining.is_set():
            return
        self._has_asked = True  # a second signal would be taken at its word
        log.warning("%s: leaving", why)
        self.exit_code = exit_code
        self.grace_s = min(self.grace_s, max(left_s - HAND_OVER_S, 0.0))
        os.kill(os.getpid(), signal.SIGTERM)

    def look(self, notices: Notices) -> None:
        """Ask, if there is a notice that this host is going."""
        if notice := notices.look():
            self.ask(f"{notice}", left_s=notice.left_s)

    def _hear_again(self, _number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._begun_s >= ECHO_S:
            os._exit(1)

    def _see_off(self) -> None:
        self._holds.draining.wait()
        if self.grace_s > 0:
            log.info("what runs may end within %.0f s", self.grace_s)
            self._holds.tell(News.CLOSING)
            self._wait_until_empty(self.grace_s)
        self._holds.drain()
        self._wait_until_empty(_STUCK_S)
        time.sleep(_CELERY_S)
        log.error("the process does not end: leaving without it")
        os._exit(self.exit_code or 1)

    def _wait_until_empty(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self._holds) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
