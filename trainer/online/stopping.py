"""What asks a training run to leave: a signal, or an error that it can't go on with.

Entered by the `train` verb before anything slow, and by train.py around all that it does. Until
steps are taken there is nothing to keep: a signal ends the process where it stands, as Draining or
KeyboardInterrupt. From then on it is noted, and the step in hand ends first. Python's handlers wait
for the main thread, which may wait in C++ for a rank that has left already: so a thread looks, too,
and ends a process that doesn't come out by itself. Invariant: former handlers stand again
afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash_workers.contract.errors import Draining, FleetError
from dflash_workers.contract.terminal import ExitCode, err

LEAVING_S = 5.0  # for the main thread to come out, where nothing is to be kept
CODES = {int(signal.SIGTERM): ExitCode.DONE, int(signal.SIGINT): ExitCode.INTERRUPTED}
TOO_EARLY = "stopped before the first step: nothing is lost, the same command begins"


class Stop:
    """Who asked to leave: a signal's number, 0 as long as none came; or an error."""

    def __init__(self) -> None:
        self.signal = 0
        self.error: FleetError | None = None
        self.is_noting = False

    def is_asked(self) -> bool:
        return self.signal != 0 or self.error is not None

    def note_from_now_on(self) -> None:
        """Steps are taken from here on: whoever takes them asks."""
        self.is_noting = True

    def ask(self, error: FleetError) -> None:
        """Have training leave in order, then raise the error. From any thread."""
        self.error = error

    def take(self, number: int) -> None:
        """A signal. Raises Draining or KeyboardInterrupt where nobody would ask."""
        is_first, self.signal = self.signal == 0, number
        if self.is_noting or not is_first:  # a second one must not break into the way out
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Draining(TOO_EARLY)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Take SIGTERM and SIGINT instead of dying of them."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python takes signals in the main thread only: whoever owns it decides
        return

    def take(number: int, _frame: FrameType | None) -> None:
        stop.take(number)

    former = {n: signal.signal(n, take) for n in CODES}
    try:
        with _watched(stop):
            yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _watched(stop: Stop) -> Iterator[None]:
    """Have a thread see signals as they arrive."""
    has_left = threading.Event()
    there, here = socket.socketpair()

    def watch() -> None:
        while number := here.recv(1):
            if stop.is_noting or number[0] not in CODES or has_left.wait(LEAVING_S):
                continue
            err.print(f"dflash-fleet: {TOO_EARLY}", markup=False, soft_wrap=True)
            os._exit(CODES[number[0]])

    thread = threading.Thread(target=watch, name="stopping", daemon=True)
    thread.start()
    there.setblocking(False)
    former = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        has_left.set()
        there.close()
        thread.join()
        here.close()
