"""`dflash-fleet` with leases of seconds: `python -m tests.faults.short_leases worker ...`.

For tests whose claim is what becomes of a dead worker's batch and not how soon: they needn't wait
for the real 15 s. Everything but these two durations is the command itself.
"""

from __future__ import annotations

import runpy

from dflash_workers.contract import keys

if __name__ == "__main__":
    keys.LEASE_MS = 2000
    keys.REAP_DEADLINE_MS = 1000
    runpy.run_module("fleet", run_name="__main__")
