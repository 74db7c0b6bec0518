"""Child processes that can't outlive us: Redis, S3, the engine, workers.

`spawn` starts a guardian (guardian.py) in a session of its own, and the guardian starts the child.
The guardian reads a pipe whose write end only we have: whether we stop the child, return, crash or
are killed -9, the pipe ends and the child's whole tree is stopped. Ctrl-C at a terminal reaches us
alone. Guardian killed -9: the kernel kills the child. Output is appended to a log, which is locked
while anything of the tree lives, so that nothing is started twice over one folder. A process that
forks without exec (multiprocessing's fork) holds the pipe as well and must not be left behind.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from dflash_workers.contract.errors import BadInput, FleetError, Missing, NotEnough

GUARDIAN = Path(__file__).with_name("guardian.py")
LOCK_WAIT_S = 10.0  # longer than an orphaned tree takes to stop
TAIL_BYTES = 65_536


@dataclass(eq=False)
class Child:
    """A running child and its guardian. Use as a context manager, or call `stop`."""

    name: str
    pid: int  # the child's own, not the guardian's
    log_path: Path
    guardian: subprocess.Popen[bytes] = field(repr=False)
    _life: BinaryIO = field(repr=False)
    _log_start: int = field(repr=False)

    def poll(self) -> int | None:
        """None while it runs; else its exit status, negative for a signal."""
        return self.guardian.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status. Raises NotEnough when it still runs after `timeout_s`."""
        try:
            return self.guardian.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NotEnough(f"{self.name} still runs after {timeout_s:g} s") from error

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, up to `grace_s` of grace, SIGKILL; nothing of its tree is left. Safe to repeat.

        A grace of 0 is SIGKILL at once.
        """
        with suppress(BrokenPipeError, ValueError):  # it has ended, or stop was called before
            self._life.write(f"{grace_s}".encode())
        self._life.close()
        try:
            self.guardian.wait(grace_s + LOCK_WAIT_S)
        except subprocess.TimeoutExpired:
            self.guardian.kill()
            self.guardian.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the child itself, not to its tree; nothing happens where it has ended."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def tail(self, num_lines: int = 20) -> str:
        """The last lines that this child (not an earlier one) wrote to its log."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            start = self._log_start if self._log_start <= end else 0  # else it was rotated
            log.seek(max(start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def spawn(
    argv: Sequence[str],
    *,
    name: str,
    log_path: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start a child; `environ` is its whole environment (None: ours).

    Raises Missing where the program is not there, BadInput where a live child has this log.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        _lock(log, name)
        log_start = log.tell()
        life_read, life_write = os.pipe()
        report_read, report_write = os.pipe()
        # -E -P: the child's PYTHONPATH and the folder of guardian.py must not change its imports.
        guardian = subprocess.Popen(
            [sys.executable, "-E", "-P", GUARDIAN, str(life_read), str(report_write), *argv],
            pass_fds=(life_read, report_write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            cwd=cwd,
            start_new_session=True,
        )
    os.close(life_read)
    os.close(report_write)
    with os.fdopen(report_read, "rb") as report:
        kind, _, text = report.read().decode().partition(" ")
    life = os.fdopen(life_write, "wb", buffering=0)
    child = Child(name, 0, log_path, guardian, life, log_start)
    if kind != "pid":
        child.stop(0)
        raise _start_error(child, text)
    child.pid = int(text)
    return child


def _lock(log: BinaryIO, name: str) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"{name} runs already with this folder ({log.name} is in use): "
                    "stop it, or use another folder"
                ) from error
            time.sleep(0.1)


def _start_error(child: Child, text: str) -> FleetError:
    if text:
        return Missing(f"{child.name} can't be started: {text}")
    return NotEnough(f"{child.name} can't be started:\n{child.tail()}")
