"""A worker that should not get to work: how it leaves, and what it says.

For tests of what is refused at the start; fleet.py starts the workers that are to live.
"""

from __future__ import annotations

import subprocess
import sys

from dflash_workers.contract.settings import Settings
from tests.faults.processes import ROOT


def run_worker(settings: Settings) -> tuple[int, str]:
    """Exit code and stderr of a worker that waits 2 s for its engine."""
    values = {k: v for k, v in settings.environment().items() if v}
    process = subprocess.run(
        [sys.executable, "-m", "fleet", "worker", "--wait-s", "2"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | values,
        capture_output=True,
        text=True,
        timeout=90,
    )
    return process.returncode, process.stderr
