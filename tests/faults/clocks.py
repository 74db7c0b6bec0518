"""A wall clock of a process' own, which a test may set forward and back while the process runs.

Given to fleet.py's processes as environment; clock.c, built here with the machine's compiler, is
what they preload. The machine's own clock is never touched. Without a compiler there are no
clocks, and whoever wanted one must say so.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """One shift, shared by all processes that are started with its `environ`."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises FileNotFoundError where there is no C compiler."""
        self._file = folder / f"{name}.clock"
        library = folder / f"{name}.so"
        sources = ["-o", str(library), str(SOURCE)]
        command = [_compiler(), "-shared", "-fPIC", "-O1", *sources, "-ldl", "-lm"]
        subprocess.run(command, check=True)
        self.set(0.0)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._file)}

    def set(self, shift_s: float) -> None:
        """From now on the wall clock is so much ahead (negative: behind)."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("d", shift_s))


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not found:
        raise FileNotFoundError("no C compiler, so no shifted clocks")
    return found
