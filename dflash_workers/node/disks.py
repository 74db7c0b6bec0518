"""Where a path lies: which file system, over a network or not, and how fast it reads.

Asked by -> checks and staged. A model, a venv or logs on a network file system work, slowly, and
nobody sees why; so it is measured and said. The kind comes from the mount table, the rate from
reading a file with its pages dropped from the cache first, for a second at most.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

NETWORK_KINDS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"),
    *("nfs", "nfs4", "ocfs2", "panfs", "smb3", "smbfs", "virtiofs", "wekafs"),
}
# FUSE is mostly a network's (sshfs, gcsfuse, s3fs, JuiceFS...), but for these.
LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuseblk"}
READ_BYTES = 256 << 20
READ_S = 1.0
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a path."""

    mount: str
    kind: str  # as the mount table names it: ext4, nfs4, tmpfs

    @property
    def is_network(self) -> bool:
        """Whether reading goes over a network."""
        if self.kind.startswith("fuse"):
            return self.kind not in LOCAL_FUSE
        return self.kind in NETWORK_KINDS

    @property
    def is_ram(self) -> bool:
        """Whether it is a RAM disk."""
        return self.kind in ("tmpfs", "ramfs")


def disk_of(path: Path) -> Disk:
    """The disk of a path, or of the nearest folder above it that exists."""
    path = path.resolve()
    disk = Disk("/", "unknown")
    for mounted in psutil.disk_partitions(all=True):
        # The later one hides the earlier where two are mounted on one folder.
        if path.is_relative_to(mounted.mountpoint) and len(mounted.mountpoint) >= len(disk.mount):
            disk = Disk(mounted.mountpoint, mounted.fstype)
    return disk


def free_bytes(path: Path) -> int:
    """What may still be written at the path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def read_rate_mb_s(path: Path) -> float | None:
    """MB per second that the path's largest file was just read with; None where none can be."""
    file = _largest_file(path)
    if file is None:
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Of a RAM disk and of pages that others use nothing is dropped.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return _read_for_a_while(descriptor)
    finally:
        os.close(descriptor)


def _read_for_a_while(descriptor: int) -> float | None:
    num_bytes, started = 0, time.monotonic()
    while num_bytes < READ_BYTES and time.monotonic() - started < READ_S:
        part = os.read(descriptor, CHUNK_BYTES)
        if not part:
            break
        num_bytes += len(part)
    seconds = time.monotonic() - started
    return num_bytes / 1e6 / max(seconds, 1e-6) if num_bytes else None


def _largest_file(path: Path) -> Path | None:
    """Of a folder's own files: a venv's tree is not walked."""
    if path.is_file():
        return path
    try:
        files = [
            (entry.stat().st_size, Path(entry.path))
            for entry in os.scandir(path)
            if entry.is_file()
        ]
    except OSError:
        return None
    return max(files)[1] if files else None
