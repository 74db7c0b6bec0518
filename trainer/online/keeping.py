"""Checkpoints in the background: to disk, then to S3, the last few and the best.

Owned by train.py's leader. Training stops for as long as a copy to the host's memory takes; a
thread writes it to disk, another sends it to S3. In S3 a checkpoint is complete once its state.json
is there, which comes last and goes first, with all parts that it names. Invariants: the newest
checkpoint on disk is never older than the one before the last `save`; what goes on elsewhere goes
on from the newest complete one, wherever that lies.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dflash_workers.contract.errors import Corrupt, FleetError, Missing, Transient
from dflash_workers.contract.store import Store
from trainer.online.checkpoint import (
    FETCHING,
    FOLDER,
    STATE,
    Snapshot,
    checkpoint_folders,
    latest_checkpoint,
    missing_files,
    new_draft,
    publish,
    read_state,
    remove_checkpoint,
    sweep,
    write_checkpoint,
)

log = logging.getLogger(__name__)

PAUSES_S = (2.0, 10.0, 30.0)  # between tries to reach S3, on top of the client's own

OnSent = Callable[[], None]  # after a checkpoint is in S3: what else belongs beside it


class Shelf:
    """A run's checkpoints in S3, below a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def send(self, folder: Path) -> None:
        """Safe to repeat. Raises StoreUnavailable."""
        bodies = sorted(folder.iterdir(), key=lambda path: path.name == STATE)
        for path in bodies:
            self._store.replace(f"{self._prefix}{folder.name}/{path.name}", path.read_bytes())

    def fetch_newer(self, out: Path) -> bool:
        """Bring the newest complete checkpoint to `out`, unless that has it or a newer one; whether
        one was brought. Raises Corrupt where a state.json can't be read.
        """
        passed: set[str] = set()
        # Another trainer may prune what is being fetched: each look sees what is there now.
        while names := [name for name in self.names() if name not in passed]:
            here = latest_checkpoint(out)
            if here and here.name >= names[-1]:
                return False
            if self._fetch(out / FOLDER / names[-1]):
                return True
            passed.add(names[-1])
        return False

    def names(self) -> list[str]:
        """Of those that hold a state.json, the newest last."""
        return sorted(name for name, keys in self._keys().items() if keys[0].endswith(f"/{STATE}"))

    def keep_only(self, names: set[str]) -> None:
        """Remove all others, half-sent ones included, but none that is newer than the newest of
        `names`: that is another trainer's.
        """
        for name, keys in self._keys().items():
            if name not in names and name < max(names):
                for key in keys:
                    self._store.delete(key)

    def _fetch(self, folder: Path) -> bool:
        """False, and a warning: it is not all there, or no more."""
        draft = new_draft(folder, FETCHING)
        try:
            for key, _size in self._store.list(f"{self._prefix}{folder.name}/"):
                (draft / key.rpartition("/")[2]).write_bytes(self._store.get(key))
            missing = ", ".join(missing_files(draft))
        except Missing as error:
            missing = str(error)
        if missing:
            log.warning("checkpoint %s in S3 is passed over, it lacks %s", folder.name, missing)
            shutil.rmtree(draft)
            return False
        publish(draft, folder)
        return True

    def _keys(self) -> dict[str, list[str]]:
        """By checkpoint, complete or not; state.json first, where there is one."""
        found: dict[str, list[str]] = {}
        for key, _size in self._store.list(f"{self._prefix}step-"):
            name = key.removeprefix(self._prefix).partition("/")[0]
            found.setdefault(name, []).append(key)
        for keys in found.values():
            keys.sort(key=lambda key: not key.endswith(f"/{STATE}"))
        return found


class Keeper:
    """Saves in the background; `close` ends it in order. Of one output folder there is one."""

    def __init__(
        self, out: Path, num_kept: int, shelf: Shelf | None, on_sent: OnSent = lambda: None
    ) -> None:
        self._out = out
        self._num_kept = num_kept
        self._shelf = shelf
        self._on_sent = on_sent
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._s3 = ThreadPoolExecutor(1, "checkpoint-s3")
        self._written: Future[Path] | None = None
        self._sent: Future[None] | None = None
        sweep(out)

    def save(self, snapshot: Snapshot) -> None:
        """Returns once the one before is on disk, and raises what kept that one from getting there:
        one snapshot at a time is what memory is meant for.
        """
        self.wait_written()
        self._written = self._disk.submit(self._write, snapshot)

    def wait_written(self) -> Path | None:
        """The newest checkpoint, once it is on disk; None where nothing was saved."""
        return self._written.result() if self._written else None

    def close(self) -> None:
        """Until all is on disk and in S3. Raises what kept it from getting there."""
        try:
            self.wait_written()
            if self._sent:
                self._sent.result()
        finally:
            self._disk.shutdown()
            self._s3.shutdown()

    def _write(self, snapshot: Snapshot) -> Path:
        folder = write_checkpoint(self._out, snapshot)
        self._prune()
        if self._shelf:
            if self._sent:
                self._sent.cancel()  # one that waits is not needed any more
            self._sent = self._s3.submit(self._send, self._shelf, folder)
        return folder

    def _send(self, shelf: Shelf, folder: Path) -> None:
        for pause_s in (*PAUSES_S, None):
            try:
                shelf.send(folder)
                shelf.keep_only({f.name for f in checkpoint_folders(self._out)} | {folder.name})
                self._on_sent()
                return
            except FileNotFoundError:
                return  # pruned: newer ones are on their way
            except (FleetError, OSError) as error:
                log.warning("checkpoint %s could not be sent in full: %s", folder.name, error)
                if pause_s is None or not isinstance(error, Transient):
                    raise
                time.sleep(pause_s)

    def _prune(self) -> None:
        folders = checkpoint_folders(self._out)
        best = best_checkpoint(folders)
        for old in folders[: -self._num_kept]:
            if old != best:
                remove_checkpoint(old)


def best_checkpoint(folders: list[Path]) -> Path | None:
    """The one with the longest measured accept length, the newest of equals; None: none was
    measured.
    """
    measured = [(measured_length(folder), folder) for folder in folders]
    known = [(length, folder) for length, folder in measured if length is not None]
    return max(known)[1] if known else None


def measured_length(folder: Path) -> float | None:
    """A checkpoint's accept length; None: it was not measured, or its state can't be read, which
    is said and keeps nobody from saving.
    """
    try:
        return read_state(folder).accept_length
    except (Corrupt, Missing) as error:
        log.warning("checkpoint %s counts as not measured: %s", folder.name, error)
        return None
