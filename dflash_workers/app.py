"""The Celery app: `celery -A dflash_workers.app worker --without-gossip --without-mingle`.

Its process' outermost frame: settings come from the environment (DFLASH_*) and dflash.toml, and
what is missing is said in one line at import, before any message is taken. `dflash-fleet worker`
does the same with flags; both take pool and number of threads from here unless told otherwise.
"""

from __future__ import annotations

import sys

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.settings import load_settings
from dflash_workers.logs import set_up_logs
from dflash_workers.opening import Options
from dflash_workers.worker import Worker

set_up_logs()
try:
    app = Worker(load_settings({}), Options()).make_app()
except FleetError as error:
    sys.exit(f"dflash_workers: {error}")
