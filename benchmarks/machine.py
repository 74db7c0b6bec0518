"""What this machine is, in a line.

Used by the programs beside this file, for their results.
"""

from __future__ import annotations

import os
from pathlib import Path


def describe_cpu() -> str:
    """How many cores this process may use, and whose."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{len(os.sched_getaffinity(0))} cores, {line.partition(':')[2].strip()}"
    return f"{len(os.sched_getaffinity(0))} cores"
