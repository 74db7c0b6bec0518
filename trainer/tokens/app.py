"""The tokenizers' Celery app: `celery -A trainer.tokens.app worker`; see cli/tokens.py for more.

Its process' outermost frame: settings come from the environment (DFLASH_*) and dflash.toml, and
what is missing is said in one line at import, before any message is taken.
"""

from __future__ import annotations

import logging
import os
import sys

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.queues import check_redis
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from trainer.tokens.counters import Counters, serve
from trainer.tokens.stage import make_app

METRICS_AT = "TOKENIZE_METRICS_AT"

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
logging.getLogger("celery").setLevel(logging.WARNING)
try:
    settings = load_settings({})
    check_redis(open_hints(settings).redis, settings)
    open_store(settings).check()
    counters = Counters()
    # Set by `tokenize --follow --metrics-port`: HOST:PORT. Celery's own flags are all taken.
    if where := os.environ.get(METRICS_AT):
        host, _, port = where.rpartition(":")
        serve(counters, host, int(port))
    app = make_app(settings, counters=counters)
except FleetError as error:
    sys.exit(f"tokenize: {error}")
