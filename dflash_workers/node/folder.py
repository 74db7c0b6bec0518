"""A node's folder: its lock, what it says of itself, its logs. How other commands find it.

Written by the running node (-> machine), read by `node status|stop|logs|leave`. Holds no secret.
Invariant: the lock is held exactly as long as the node lives, whatever ends it, so a number that
the system gave to another process meanwhile is never taken for it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import psutil

from dflash_workers.contract.errors import BadInput, FleetError, Missing, NotEnough
from dflash_workers.contract.records import Json

POLL_S = 0.1
FAILED = "failed"  # the state of a node that could not start


def default_folder() -> Path:
    """One per host, because a home may be shared by many."""
    return Path.home() / ".dflash-fleet" / f"node-{socket.gethostname()}"


class NodeFolder:
    """Of one node; several on one machine want a folder each."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self.models = self.path / "models"
        self.node_log = self.logs / "node.log"
        self._lock = self.path / "node.lock"
        self._facts = self.path / "node.json"

    def make(self) -> None:
        """Safe to call twice. Raises BadInput where it can't be made."""
        try:
            self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--state {self.path}: {error.strerror}: name another folder") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """As the node that runs here; what keeps it from starting stays to be read.

        Raises BadInput where one runs already.
        """
        self.make()
        with self._lock.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadInput(
                    f"a node runs here already (pid {self.read().get('pid', '?')}, {self.path}): "
                    "`dflash-fleet node stop` ends it; another one wants a --state of its own"
                ) from error
            self.write({"pid": os.getpid(), "state": "starting"})
            try:
                yield
            except FleetError as error:
                self.write(self.read() | {"state": FAILED, "why": f"{error}"})
                raise

    def is_alive(self) -> bool:
        """Whether a node runs here."""
        if not self._lock.exists():
            return False
        with self._lock.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def write(self, facts: Json) -> None:
        """What the node says of itself, as of now."""
        facts = {"host": socket.gethostname(), "time": time.time(), **facts}
        draft = self._facts.with_suffix(".new")
        draft.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        draft.replace(self._facts)

    def read(self) -> Json:
        """What it said last; nothing where none ever ran."""
        try:
            facts: Json = orjson.loads(self._facts.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}
        return facts

    def stop(self, wait_s: float) -> bool:
        """Have the node that runs here drain and end, and wait; False where none does.

        Raises NotEnough where it had to be killed.
        """
        if not self.is_alive():
            return False
        process = psutil.Process(int(self.read()["pid"]))
        process.terminate()
        deadline = time.monotonic() + wait_s
        while self.is_alive() or _runs(process):
            if time.monotonic() > deadline:
                process.kill()  # its guardians stop what it started
                raise NotEnough(f"node {process.pid} was killed: it did not end in {wait_s:g} s")
            time.sleep(POLL_S)
        return True

    def log(self, name: str) -> Path:
        """A log by its name: node, engine-0, worker-0. Raises Missing, naming those there are."""
        path = self.logs / f"{name}.log"
        if not path.is_file() or "/" in name:
            there = ", ".join(sorted(log.stem for log in self.logs.glob("*.log"))) or "none"
            raise Missing(f"no log {name!r} in {self.logs}: there are {there}")
        return path


def _runs(process: psutil.Process) -> bool:
    """A zombie doesn't: who started it may never ask for its exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
