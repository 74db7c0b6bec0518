"""The tokenizers' Celery app with a sweep a second, for tests that lose hints."""

from __future__ import annotations

import logging

from dflash_workers.contract.settings import load_settings
from trainer.tokens.stage import make_app

logging.basicConfig(level=logging.INFO)
app = make_app(load_settings({}), sweep_every_s=1)
