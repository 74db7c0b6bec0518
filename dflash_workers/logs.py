"""Plain logging for a worker process: one line per event, on stderr, no secrets.

Celery is kept from configuring logging and from two lines of its own per batch.
"""

from __future__ import annotations

import logging

from celery import signals

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logs() -> None:
    """Once per process, before Celery starts."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    logging.getLogger("celery").setLevel(logging.WARNING)
    signals.setup_logging.connect(_leave_as_it_is)  # a receiver is enough to stop Celery's own


def _leave_as_it_is(**_: object) -> None:
    pass
