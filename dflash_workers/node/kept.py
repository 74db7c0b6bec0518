"""One process that is kept running: started, waited for, watched, started again, given up at last.

Driven by -> lane with a thread of its own per process; what the process is stands in its Program.
Why neither supervisor (4.3.0, August 2025) nor circus (0.19.0, February 2025): both are kept, but
each is a daemon with a configuration and a socket of its own that outlives who called it; killed
-9, it leaves its children running; and it starts again by exit status, while an engine that hangs
still lives. What they would save is this file, for launcher.py and psutil do the processes.
Invariant: nothing is started again without the last lines of what ended in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dflash_workers.contract.errors import EngineFailed, FleetError
from dflash_workers.launcher import Child

log = logging.getLogger(__name__)

TICK_S = 0.5
WAIT_S = 2.0
CHANGE_GRACE_S = 10.0
LAST_LINES = 25


@dataclass(frozen=True, slots=True)
class Limits:
    """When to start again, and when no more."""

    max_failures: int = 5  # in a row; then it is given up
    steady_s: float = 600.0  # after so long at work, earlier failures are forgotten
    backoff_s: float = 1.0  # before the second start; doubled each time
    max_backoff_s: float = 60.0
    ready_s: float = 1800.0  # a large model, its kernels compiled and its graphs captured


class State(StrEnum):
    """What a person reads in `node status`."""

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed, starts again"
    GIVEN_UP = "given up"
    ENDED = "ended"


class Program(Protocol):
    """What is kept running. Every method may raise FleetErrors, which count as a failure."""

    name: str

    def may_start(self) -> bool:
        """Whether what it needs is there; asked until it says yes, which costs no failure."""

    def start(self) -> Child:
        """A new process."""

    def is_ready(self, child: Child) -> bool:
        """Asked until it says yes."""

    def check(self, child: Child) -> None:
        """Asked while it serves: raise where it lives and is no good any more."""

    def prepare_change(self) -> bool:
        """Asked while it serves: whether it shall be started anew, as something else. What must be
        done before it is stopped is done then."""

    def may_end(self, exit_status: int) -> bool:
        """Whether such an end is none to mend."""


class Kept:
    """A program's process. `run` belongs to one thread, all else to any."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self.name = program.name
        self.state = State.WAITING
        self.since_s = time.monotonic()  # of the state
        self.num_starts = 0
        self.why = ""  # of the last failure, in one line
        self.child: Child | None = None
        self.is_ready = threading.Event()  # has served at least once
        self._program = program
        self._limits = limits
        self._num_failures = 0
        self._is_over = False  # nothing may be started any more
        self._is_renewed = False  # its process was ended by us, to be started again
        self._starting = threading.Lock()

    def run(self, leaving: threading.Event) -> None:
        """Until told to leave, ended in peace, or given up; then call `stop`."""
        while not (leaving.is_set() or self._is_over):
            try:
                self._serve(leaving)
                if self.state is State.WAITING:  # it was renewed
                    continue
                return
            except FleetError as error:
                if leaving.is_set():
                    return
                self._fail(error)
            if self.state is State.GIVEN_UP:
                return
            leaving.wait(self._backoff_s())

    def stop(self, grace_s: float) -> None:
        """For good, whatever state it is in: no process of it is left. Safe to repeat."""
        with self._starting:
            self._is_over = True
        if self.child is not None:
            self.child.stop(grace_s)

    def forgive(self) -> None:
        """Its failures were another's, which is out of the way now."""
        self._num_failures = 0

    def renew(self, grace_s: float) -> None:
        """End its process, as no failure; it is started again as soon as it may be."""
        self._is_renewed = True
        if self.child is not None:
            self.child.stop(grace_s)

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self.child is not None and self.child.poll() is None

    def tail(self, num_lines: int = LAST_LINES) -> str:
        """The last lines that its process wrote."""
        return self.child.tail(num_lines) if self.child else ""

    def _serve(self, leaving: threading.Event) -> None:
        self._become(State.WAITING)
        while not self._program.may_start():
            if leaving.wait(WAIT_S):
                return
        with self._starting:
            if self._is_over:
                return
            self.num_starts += 1
            self._is_renewed = False
            self.child = child = self._program.start()
            self._become(State.STARTING)
        while not leaving.wait(TICK_S):
            status = child.poll()
            if status is not None:
                if self._is_renewed:
                    return self._become(State.WAITING)
                if self._program.may_end(status):
                    return self._become(State.ENDED)
                raise EngineFailed(f"{self.name} ended with status {status}")
            if self.state is State.SERVING:
                self._program.check(child)
                self._forget_failures()
                if self._program.prepare_change():
                    self.renew(CHANGE_GRACE_S)
            elif self._program.is_ready(child):
                log.info("%s: ready after %.0f s", self.name, self._in_state_s())
                self._become(State.SERVING)
                self.is_ready.set()
            elif self._in_state_s() > self._limits.ready_s:
                raise EngineFailed(f"{self.name} was not ready within {self._limits.ready_s:g} s")

    def _fail(self, error: FleetError) -> None:
        lines = self.tail()
        if self.child is not None:
            self.child.stop(0)
        self._num_failures += 1
        self.why = str(error).splitlines()[0]
        is_last = self._num_failures >= self._limits.max_failures
        log.error(
            "%s: failure %d of %d: %s%s%s",
            *(self.name, self._num_failures, self._limits.max_failures, error, _advice(lines)),
            f"; its last lines:\n{lines}" if lines else "",
        )
        self._become(State.GIVEN_UP if is_last else State.FAILED)

    def _forget_failures(self) -> None:
        if self._num_failures and self._in_state_s() > self._limits.steady_s:
            self._num_failures = 0

    def _backoff_s(self) -> float:
        doubled = self._limits.backoff_s * 2.0 ** (self._num_failures - 1)
        return min(doubled, self._limits.max_backoff_s)

    def _become(self, state: State) -> None:
        self.state, self.since_s = state, time.monotonic()

    def _in_state_s(self) -> float:
        return time.monotonic() - self.since_s


def _advice(lines: str) -> str:
    """For the one end that people can mend by a flag, and meet most."""
    text = lines.lower()
    if "out of memory" in text or "not enough memory" in text:
        return (
            ": its memory is too small for this: stop what else uses the GPU, lower "
            "--max-in-flight, or pass --engine-arg '--mem-fraction-static 0.8'"
        )
    return ""
