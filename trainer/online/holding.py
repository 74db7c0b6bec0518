"""That a training's name is in one trainer's hands at a time, by S3 alone.

Entered by train.py's leader around all that it does. Below `train/<name>/holders/` stands who has
had the name, `<n>.json`, written once each: the last one has it. Beside it, `<n>.beat`, the holder
counts while it lives. Whoever comes later watches that count by its own clock and compares no two
hosts' clocks: it moves, then the name is taken; it stands still for SILENCE_S, or the holder said
goodbye, or was a process of this very host that is gone: then the next number is claimed, which one
of several gets. A holder that was taken for dead finds the next number and leaves. Invariant: two
trainers of one name go on side by side for no longer than BEAT_S, in which the order is still one
(order.py) and their checkpoints are of one and the same training.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from dflash_workers.contract.errors import Conflict, FleetError, LeaseLost, Missing
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.store import Store

log = logging.getLogger(__name__)

BEAT_S = 10.0
SILENCE_S = 45.0  # four beats, and a moment for S3
LOOK_S = 2.0
LEFT = b"left"

OnLost = Callable[[FleetError], None]


@dataclass(frozen=True, slots=True)
class Holder:
    """`holders/<n>.json`."""

    number: int
    host: str  # for people
    pid: int
    since: str  # for people: by the holder's clock
    machine: str  # what has the same process ids; empty: unknown
    started: str  # of the process, by its machine's ticks
    token: str  # no two are alike

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Hold:
    """A name, while entered."""

    def __init__(self, store: Store, prefix: str, on_lost: OnLost) -> None:
        """`prefix`: of the training's name, ending in "/"; `on_lost` is called from a thread."""
        self._store = store
        self._name = prefix.rstrip("/")
        self._prefix = f"{prefix}holders/"
        self._on_lost = on_lost
        self._number = 0
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="holding", daemon=True)

    def __enter__(self) -> Hold:
        """Waits up to SILENCE_S for a sign of life of whoever had the name. Raises Conflict where
        it lives, StoreUnavailable.
        """
        while True:
            last = self._last()
            if last:
                self._wait_until_free(last)
            self._number = last.number + 1 if last else 0
            try:
                self._store.put_new(self._key(self._number, "json"), dump(_myself(self._number)))
                break
            except Conflict:
                continue  # somebody else was first: it lives
        self._store.replace(self._key(self._number, "beat"), b"0")
        self._beating.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._beating.join()
        try:
            self._store.replace(self._key(self._number, "beat"), LEFT)
        except FleetError as trouble:
            log.warning("the next trainer will wait %.0f s for this one: %s", SILENCE_S, trouble)

    def _last(self) -> Holder | None:
        keys = [key for key, _size in self._store.list(self._prefix) if key.endswith(".json")]
        return load(Holder, self._store.get(keys[-1])) if keys else None

    def _wait_until_free(self, holder: Holder) -> None:
        began, first, has_said = time.monotonic(), self._word(holder), False
        while (word := self._word(holder)) == first and word != LEFT and not _is_gone(holder):
            waited_s = time.monotonic() - began
            if waited_s > SILENCE_S:
                break
            if waited_s > LOOK_S and not has_said:
                has_said = True
                log.warning("%s was left by %s without a word: is it alive?", self._name, holder)
            time.sleep(LOOK_S)
        if word not in (first, LEFT):
            raise Conflict(
                f"{self._name} is being trained by {holder}: stop that one first, or train under "
                "another name (--name, and an --out of its own)"
            )

    def _word(self, holder: Holder) -> bytes:
        try:
            return self._store.get(self._key(holder.number, "beat"))
        except Missing:
            return b""

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_S):
            beat += 1
            try:
                self._store.replace(self._key(self._number, "beat"), str(beat).encode())
                later = load(Holder, self._store.get(self._key(self._number + 1, "json")))
            except Missing:
                continue  # nobody came
            except FleetError as trouble:
                log.warning("%s: %s", self._name, trouble)
                continue
            self._on_lost(
                LeaseLost(
                    f"{self._name} was taken over by {later}, because nothing was heard of this "
                    "trainer: it leaves"
                )
            )
            return

    def _key(self, number: int, kind: str) -> str:
        return f"{self._prefix}{number:06d}.{kind}"


def _myself(number: int) -> Holder:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    pid = os.getpid()
    return Holder(
        number, socket.gethostname(), pid, since, _machine(), _started(pid), uuid.uuid4().hex
    )


def _is_gone(holder: Holder) -> bool:
    """Whether it certainly is: a process of this machine, of which nothing is left."""
    return bool(holder.machine) and (
        holder.machine == _machine() and holder.started != _started(holder.pid)
    )


def _machine() -> str:
    """This boot's id and this namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When, in the kernel's ticks; empty: there is no such process, or a dead one at most."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
