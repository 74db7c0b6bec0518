"""Logs that don't fill a node's disk: copied away and emptied in place, once they are large.

Called by -> machine every few seconds. Engines write to an open file that nobody can make them open
anew, and launcher's lock lies on that file: so it stays, and its content moves. Writers append, so
they go on at its new beginning; a line that is written between the copy's last read and the cut,
some microseconds, is lost.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_BYTES = 64 << 20
NUM_KEPT = 3


def rotate(log_path: Path, max_bytes: int = MAX_BYTES, num_kept: int = NUM_KEPT) -> bool:
    """Move what is in the log to `<log>.1` if it is too much; older ones to .2 and so on."""
    if not log_path.exists() or log_path.stat().st_size < max_bytes:
        return False
    for number in range(num_kept - 1, 0, -1):
        older = _numbered(log_path, number)
        if older.exists():
            older.replace(_numbered(log_path, number + 1))
    with log_path.open("r+b") as log, _numbered(log_path, 1).open("wb") as copy:
        shutil.copyfileobj(log, copy, 1 << 20)
        os.ftruncate(log.fileno(), 0)
    return True


def _numbered(log_path: Path, number: int) -> Path:
    return log_path.with_name(f"{log_path.name}.{number}")
