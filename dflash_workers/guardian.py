"""The process between us and a child: stops the child's whole tree when we are gone or ask for it.

Started by launcher.py as a file of its own; needs the standard library and psutil only. Facts that
force it: a parent-death signal is sent when the *thread* that forked ends, so a long-lived single
thread has to fork; grandchildren do not inherit it, so somebody must find them; a process whose
parent dies goes to the nearest child subreaper, which this one is, so nothing leaves its tree.
Only the end of the pipe counts: signals that a service manager sends to everybody do nothing here.
Linux only (prctl, pidfd).
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

DEFAULT_GRACE_S = 5.0  # for when we died and could not say how long to wait
POLL_S = 0.02

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """guardian.py LIFE_FD REPORT_FD ARGV...: end as the child ends."""
    life, report = int(sys.argv[1]), int(sys.argv[2])
    # Handlers and not SIG_IGN: exec resets handlers, the child would inherit an ignored signal.
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(sys.argv[3:], preexec_fn=_die_with_guardian)
    except OSError as error:
        os.write(report, f"error {error.strerror}: {sys.argv[3]}".encode())
        sys.exit(127)
    os.write(report, f"pid {child.pid}".encode())
    os.close(report)
    grace_s = _wait_for_end(life, child)
    _stop_tree(child, grace_s)
    _end_as(child.wait())


def _die_with_guardian() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_for_end(life: int, child: subprocess.Popen[bytes]) -> float:
    """Until the child ends or the pipe does; return the seconds of grace for what still runs."""
    child_fd = os.pidfd_open(child.pid)
    ready, _, _ = select.select([life, child_fd], [], [])
    if life not in ready:
        return DEFAULT_GRACE_S
    words = b""
    while part := os.read(life, 64):
        words += part
    return float(words) if words else DEFAULT_GRACE_S


def _stop_tree(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to each process once its parent is gone, then SIGKILL to all that is left."""
    deadline = time.monotonic() + grace_s
    told: set[psutil.Process] = set()
    while (left := _descendants(child)) and time.monotonic() < deadline:
        for process in set(psutil.Process().children()) - told:
            _send(process, signal.SIGTERM)
            told.add(process)
        time.sleep(POLL_S)
    while left:
        for process in left:
            _send(process, signal.SIGKILL)
        time.sleep(POLL_S)
        left = _descendants(child)


def _descendants(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that still runs, threads of a dead main thread included: what ended is reaped first."""
    child.poll()
    for process in psutil.Process().children():
        if process.pid != child.pid:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return psutil.Process().children(recursive=True)


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _end_as(returncode: int) -> None:
    if returncode < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped its core already
        if -returncode != signal.SIGKILL:
            signal.signal(-returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -returncode)
    sys.exit(returncode)


if __name__ == "__main__":
    main()
