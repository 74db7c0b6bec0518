"""The Celery app, for `celery -A dflash_workers.app worker -P threads -c 3`.

Its process' outermost frame: settings come from the environment (DFLASH_*) and dflash.toml, and
whatever is missing is said at import, before any message is taken. `dflash-fleet worker` does the
same with flags.
"""

from __future__ import annotations

from dflash_workers.contract.settings import load_settings
from dflash_workers.logs import set_up_logs
from dflash_workers.worker import Options, Worker

set_up_logs()
app = Worker(load_settings({}), Options()).make_app()
