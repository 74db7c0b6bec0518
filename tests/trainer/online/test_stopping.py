"""Signals before the first step, between steps, and on the way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dflash_workers.contract.errors import Draining, LeaseLost
from trainer.online.stopping import stop_signals


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Draining), (signal.SIGINT, KeyboardInterrupt)]
)
def test_before_the_first_step_a_signal_ends_training_where_it_stands_and_once(
    number: signal.Signals, error: type[BaseException]
) -> None:
    before = signal.getsignal(number)
    ways_out = 0

    with pytest.raises(error), stop_signals() as stop:
        try:
            os.kill(os.getpid(), number)
        finally:
            ways_out += 1
            os.kill(os.getpid(), number)  # somebody is impatient
            ways_out += 1

    assert (ways_out, stop.signal) == (2, number)
    assert signal.getsignal(number) is before


def test_between_steps_a_signal_is_noted_and_the_last_one_counts() -> None:
    with stop_signals() as stop:
        stop.note_from_now_on()
        assert not stop.is_asked()

        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

        assert stop.is_asked() and stop.signal == signal.SIGINT


def test_an_error_asks_to_leave_as_a_signal_does() -> None:
    with stop_signals() as stop:
        stop.ask(LeaseLost("taken over"))

        assert stop.is_asked() and stop.signal == 0


WAITING = """
import os, signal, threading
from datetime import timedelta
import torch.distributed as dist
from trainer.online import stopping
stopping.LEAVING_S = 0.2
with stopping.stop_signals():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=100))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    store.wait(["a rank that has left already"])
"""


@pytest.mark.slow
def test_a_process_that_waits_where_no_handler_runs_ends_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, timeout=90)

    assert done.returncode == 0, done.stderr
    assert b"stopped before the first step" in done.stderr
