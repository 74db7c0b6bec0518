"""The model near the GPUs: fetched once per machine, into a RAM disk or onto the local disk.

Called by -> machine; hands a folder to engines and workers. What lies on a local disk is used where
it is: all engines read it through one page cache, and a copy would only take the memory twice. What
comes over a network is copied, to /dev/shm where it fits beside the engines, else to the local
disk, and says so. Invariants: a folder with the manifest is whole, of the sizes in there, and
appears by one rename; one process at a time fetches, others wait and find it done; models that no
node uses give way to one that needs the room.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from dflash_workers.contract.errors import BadInput, Corrupt, NotEnough
from dflash_workers.contract.settings import Settings
from dflash_workers.node.disks import disk_of, free_bytes
from dflash_workers.node.fetching import FolderSource, Source, open_source

log = logging.getLogger(__name__)

AUTO, RAM, DISK, NEVER = WHERE = ("auto", "ram", "disk", "never")
MANIFEST = ".dflash-staged.json"
CHECKSUMS = "SHA256SUMS"  # as sha256sum writes it; checked where the model brings one
RAM_ROOT = Path(f"/dev/shm/dflash-fleet-{os.getuid()}")
MEMORY_KEPT_BYTES = 4 << 30  # for engines and workers, beside a model in a RAM disk
DISK_KEPT_BYTES = 1 << 30
SAY_EVERY_S = 5.0
_CGROUP = Path("/sys/fs/cgroup")  # version 2; a container's own


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where models may be put."""

    disk_root: Path
    ram_root: Path = RAM_ROOT
    where: str = AUTO


def stage_model(model: str, shelf: Shelf, settings: Settings) -> Path:
    """The model's folder on this machine. A second call finds it within milliseconds.

    Raises Missing, BadInput, Corrupt for files that are not whole, NotEnough where no place has
    room.
    """
    if shelf.where not in WHERE:
        raise BadInput(f"--stage {shelf.where!r}: use {', '.join(WHERE)}")
    source = open_source(model, settings)
    if isinstance(source, FolderSource) and _stays(source.folder, shelf.where):
        check_whole(source.folder)
        return source.folder
    if shelf.where == NEVER:
        raise BadInput(f"--stage never wants a folder of this machine, not {model}")
    name = f"{source.name}-{hashlib.sha256(source.identity().encode()).hexdigest()[:12]}"
    roots = [shelf.disk_root] if shelf.where == DISK else [shelf.ram_root, shelf.disk_root]
    for root in roots:
        if is_staged(root / name):
            log.info("model: %s is staged already in %s", source.name, root)
            return root / name
    return _stage(source, name, roots)


def is_staged(folder: Path) -> bool:
    """Whether all of the manifest's files are there, of the sizes in it."""
    try:
        sizes = orjson.loads((folder / MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, orjson.JSONDecodeError, AttributeError):
        return False


def check_whole(folder: Path) -> None:
    """Raise Corrupt where a weight file is missing, cut short, or not what SHA256SUMS says."""
    for index in folder.glob("*.safetensors.index.json"):
        shards = set(orjson.loads(index.read_bytes())["weight_map"].values())
        if missing := sorted(name for name in shards if not (folder / name).is_file()):
            raise Corrupt(f"{folder}: {missing[0]} is missing, which {index.name} names")
    for path in sorted(folder.glob("*.safetensors")):
        wanted, found = _safetensors_bytes(path), path.stat().st_size
        if wanted != found:
            raise Corrupt(f"{path}: {found} bytes, and its header means {wanted}: fetch it again")
    if not (folder / "config.json").is_file():
        raise Corrupt(f"{folder}: no config.json, so this is no model's folder")


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep a staged model from giving way to another while the block runs."""
    lock = _lock_of(folder)
    if not (folder / MANIFEST).exists() or not lock.exists():
        yield  # a person's own folder
        return
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _stays(folder: Path, where: str) -> bool:
    if where == AUTO:
        return not disk_of(folder).is_network
    return where == NEVER or (where == RAM and disk_of(folder).is_ram)


def _stage(source: Source, name: str, roots: list[Path]) -> Path:
    num_bytes = source.num_bytes()
    root = _choose(roots, name, num_bytes)
    folder = root / name
    with _locked(folder):
        if is_staged(folder):
            return folder
        scratch = root / f".{name}.part"
        for leftover in (scratch, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir()
        started = time.monotonic()
        try:
            source.fetch_into(scratch, _Meter(source.name, num_bytes))
            check_whole(scratch)
            _check_sums(scratch)
            sizes = {path.name: path.stat().st_size for path in scratch.iterdir()}
            (scratch / MANIFEST).write_bytes(orjson.dumps(sizes))
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)  # a RAM disk's garbage is memory
            raise
    seconds = max(time.monotonic() - started, 1e-3)
    log.info(
        "model: %s is in %s, %.1f GB in %.0f s (%.0f MB/s)",
        *(source.name, root, num_bytes / 1e9, seconds, num_bytes / 1e6 / seconds),
    )
    return folder


def _choose(roots: list[Path], name: str, num_bytes: int) -> Path:
    """The first root with room, made; models that nobody uses give way."""
    for root in roots:
        _make_root(root)
        room = _room(root)
        if room < num_bytes:
            _evict(root, name, num_bytes)
            room = _room(root)
        if room >= num_bytes:
            return root
        log.warning(
            "model: %.1f GB don't fit into %s, where %.1f GB are to spare",
            *(num_bytes / 1e9, root, max(room, 0) / 1e9),
        )
    raise NotEnough(
        f"no room for the model's {num_bytes / 1e9:.1f} GB in {' or '.join(map(str, roots))}: "
        "free some, or name a larger disk with --state"
    )


def _room(root: Path) -> int:
    """Bytes that a model may take there; a RAM disk's are taken from the engines' memory."""
    if not disk_of(root).is_ram:
        return free_bytes(root) - DISK_KEPT_BYTES
    return min(free_bytes(root), _free_memory_bytes() - MEMORY_KEPT_BYTES)


def _free_memory_bytes() -> int:
    """The machine's, or what the container may still take."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no limit reads "max"
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        facts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(facts.get("inactive_file", 0)))
    return available


def _make_root(root: Path) -> None:
    """Ours alone: /dev/shm may be written by everybody."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise BadInput(f"{root} belongs to another user: remove it, or use --stage disk")


def _evict(root: Path, name: str, wanted_bytes: int) -> None:
    """Remove staged models that no node uses, the oldest first, until there is room."""
    staged = [path.parent for path in root.glob(f"*/{MANIFEST}") if path.parent.name != name]
    for folder in sorted(staged, key=lambda folder: folder.stat().st_mtime):
        if _room(root) >= wanted_bytes:
            return
        with _lock_of(folder).open("ab") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("model: %s gives way", folder)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with _lock_of(folder).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("model: another process is fetching it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _safetensors_bytes(path: Path) -> int:
    """What the file's own header says that its size must be; 0 where it has none."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= path.stat().st_size:
            return 0
        try:
            header = orjson.loads(file.read(header_bytes))
            ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            return 0
    return 8 + header_bytes + max(ends, default=0)


def _check_sums(folder: Path) -> None:
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return
    for line in sums.read_text(encoding="utf-8").splitlines():
        wanted, _, name = line.partition(" ")
        path = folder / name.lstrip(" *./")
        if not path.is_file():
            continue  # lists what isn't fetched as well
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise Corrupt(f"{path.name} is not what {CHECKSUMS} says: fetch it again")


class _Meter:
    """Says how far it is, every few seconds. Told by several threads."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name = name
        self._wanted = num_bytes
        self._come = 0
        self._started = self._said = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._come += num_bytes
            now = time.monotonic()
            if now - self._said < SAY_EVERY_S:
                return
            self._said = now
        share = 100 * self._come / max(self._wanted, 1)
        rate = self._come / 1e6 / (now - self._started)
        log.info("model: %s, %.0f %% here, %.0f MB/s", self._name, share, rate)
