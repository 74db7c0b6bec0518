"""Signals that ask a training run to leave, noted and no more.

Used by train.py around its steps. Invariant: former handlers stand again afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """The signal that asked to leave, 0 as long as none did."""

    signal = 0

    def is_asked(self) -> bool:
        return self.signal != 0


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note SIGTERM and SIGINT instead of dying of them."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python takes signals in the main thread only: whoever owns it decides
        return

    def note(number: int, _frame: FrameType | None) -> None:
        stop.signal = number

    former = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
