"""Whether this worker should take work at all: a circuit breaker over what it depends on.

Fed by the worker with each attempt's outcome (`record`) and asked before work is taken
(`lets_through`) and for heartbeat and log (`why_open`). Open, the worker takes nothing, says why,
and comes back by itself: after a pause one probe is let through; its success closes the breaker,
its failure doubles the pause. Without it a worker beside a broken engine eats the queue, batch by
batch, while healthy ones wait. The clock is the caller's: nothing here sleeps or looks at the time.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["engine", "store", "redis", "disk"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When it opens, and how long it stays open."""

    window_s: float = 60.0  # how far back attempts count
    failed_share: float = 0.5  # of them: that many failures open it,
    min_attempts: int = 20  # given that many attempts
    failing_s: float = 30.0  # no success for so long opens it,
    min_failures: int = 3  # given that many failures: a quiet worker makes few attempts
    pause_s: float = 5.0  # before the first probe; doubled by each that fails
    max_pause_s: float = 60.0
    probe_s: float = 60.0  # a probe whose outcome never came: another may go


class Breaker:
    """Safe to share between threads."""

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._circuits: dict[Kind, _Circuit] = {
            "engine": _Circuit(limits),
            "store": _Circuit(limits),
            "redis": _Circuit(limits),
        }
        self._is_disk_full = False
        self._lock = threading.Lock()

    def record(self, kind: Kind, ok: bool, now_s: float) -> None:
        """One attempt's outcome; for the disk, one measurement, of which the last alone counts."""
        with self._lock:
            if kind == "disk":
                self._is_disk_full = not ok
            else:
                self._circuits[kind].record(ok, now_s)

    def why_open(self) -> str | None:
        """The reasons, for people; None while closed. The same text until a reason changes."""
        with self._lock:
            reasons = [f"{kind}: {c.why}" for kind, c in self._circuits.items() if c.why]
            if self._is_disk_full:
                reasons.append("disk: nearly full")
        return "; ".join(reasons) or None

    def lets_through(self, now_s: float) -> bool:
        """Whether work may be taken. While open, True is for one probe: take it, or lose it."""
        with self._lock:
            is_open = [circuit for circuit in self._circuits.values() if circuit.why]
            if self._is_disk_full or not all(circuit.may_probe(now_s) for circuit in is_open):
                return False
            for circuit in is_open:
                circuit.probed_s = now_s
            return True


def has_room(folder: Path, min_free_bytes: int) -> bool:
    """Whether the disk of `folder` has so much left; a folder that can't be looked at has none."""
    try:
        return shutil.disk_usage(folder).free >= min_free_bytes
    except OSError:
        return False


class _Circuit:
    """One thing that the worker depends on."""

    def __init__(self, limits: Limits) -> None:
        self.why = ""  # empty: closed
        self.probed_s: float | None = None
        self._limits = limits
        self._attempts: deque[tuple[float, bool]] = deque()  # of the window: (when, ok)
        self._num_failed = 0  # among them
        self._num_failures = 0  # since a success
        self._failing_since_s = 0.0  # the first of these,
        self._failed_s = 0.0  # and the last
        self._open_until_s = 0.0
        self._closed_s: float | None = None
        self._num_pauses = 0  # so far, without a window in peace between them

    def may_probe(self, now_s: float) -> bool:
        if now_s < self._open_until_s:
            return False
        return self.probed_s is None or now_s - self.probed_s >= self._limits.probe_s

    def record(self, ok: bool, now_s: float) -> None:
        if not self.why:
            self._add(ok, now_s)
            if not ok:
                self._open(self._find_reason(now_s), now_s)
        elif now_s >= self._open_until_s:  # earlier ones were asked before it opened
            if ok:
                self._close(now_s)
            else:
                self._open(self.why, now_s)

    def _add(self, ok: bool, now_s: float) -> None:
        self._attempts.append((now_s, ok))
        self._num_failed += not ok
        while self._attempts[0][0] <= now_s - self._limits.window_s:
            self._num_failed -= not self._attempts.popleft()[1]
        if ok or now_s - self._failed_s > self._limits.window_s:
            self._num_failures = (
                0  # it is up; or nobody has tried for so long that it may have been
            )
        if not ok:
            if not self._num_failures:
                self._failing_since_s = now_s
            self._failed_s = now_s
            self._num_failures += 1

    def _find_reason(self, now_s: float) -> str:
        """Empty: none."""
        limits, num_attempts = self._limits, len(self._attempts)
        share = self._num_failed / num_attempts
        if num_attempts >= limits.min_attempts and share >= limits.failed_share:
            return f"{self._num_failed} of {num_attempts} failed within {limits.window_s:g} s"
        failing_s = now_s - self._failing_since_s
        if self._num_failures >= limits.min_failures and failing_s >= limits.failing_s:
            return f"no success for {failing_s:.0f} s"
        return ""

    def _open(self, reason: str, now_s: float) -> None:
        if not reason:
            return
        limits = self._limits
        if self._closed_s is not None and now_s - self._closed_s >= limits.window_s:
            self._num_pauses = 0
        pause_s = min(limits.pause_s * 2 ** min(self._num_pauses, 16), limits.max_pause_s)
        self.why, self.probed_s, self._closed_s = reason, None, None
        self._open_until_s = now_s + pause_s
        self._num_pauses += 1

    def _close(self, now_s: float) -> None:
        self.why, self._closed_s = "", now_s
        self._attempts.clear()
        self._num_failed = self._num_failures = 0
