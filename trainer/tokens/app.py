"""The tokenizers' Celery app: `celery -A trainer.tokens.app worker`; see cli/tokens.py for more.

Its process' outermost frame: settings come from the environment (DFLASH_*) and dflash.toml, and
what is missing is said in one line at import, before any message is taken.
"""

from __future__ import annotations

import logging
import sys

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.hints import check_redis, open_hints
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from trainer.tokens.stage import make_app

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
logging.getLogger("celery").setLevel(logging.WARNING)
try:
    settings = load_settings({})
    check_redis(open_hints(settings).redis, settings)
    open_store(settings).check()
    app = make_app(settings)
except FleetError as error:
    sys.exit(f"tokenize: {error}")
