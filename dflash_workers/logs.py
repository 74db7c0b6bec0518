"""Plain logging for a worker process: one line per event, on stderr, no secrets.

Celery is kept from configuring logging and from two lines of its own per batch.
"""

from __future__ import annotations

import logging

from celery import signals

from dflash_workers.contract.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OneLine(logging.Formatter):
    """Further lines of an event are indented, so that no text from elsewhere can begin one."""

    def format(self, record: logging.LogRecord) -> str:
        """The event, without control characters."""
        return printable(super().format(record)).replace("\n", "\n  ")


def set_up_logs() -> None:
    """Once per process, before Celery starts."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("celery").setLevel(logging.WARNING)
    signals.setup_logging.connect(_leave_as_it_is)  # a receiver is enough to stop Celery's own


def _leave_as_it_is(**_: object) -> None:
    pass
