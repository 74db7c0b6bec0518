"""What Celery receives and can't read: counted, told in one line, and never the end of a worker.

Hooked in by worker. A garbled message would otherwise be logged with its traceback at best; at
worst its error ends the consumer, which puts the message back for the next worker to end of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import celery
import kombu
from celery import bootsteps, signals

from dflash_workers.worksite import UNREADABLE, Tally

log = logging.getLogger(__name__)


def count_unreadable(app: celery.Celery, tally: Tally) -> None:
    """Have this app's consumer survive, and count, what it can't read."""

    def note(message: kombu.Message, error: object) -> None:
        tally.add(UNREADABLE)
        log.error("unreadable message dropped: %s: %.200r", error, message.body)

    class Inbox(bootsteps.Step):
        """Made with Celery's consumer, before it connects; has no part in it afterwards."""

        def __init__(self, consumer: Any, **_options: Any) -> None:
            lost = (*consumer.connection_errors, *consumer.channel_errors)
            make_handler = consumer.create_task_handler
            consumer.create_task_handler = lambda: _guarded(make_handler(), lost, note)
            consumer.on_decode_error = lambda message, error: _drop(message, error, note)

    app.steps["consumer"].add(Inbox)
    signals.task_rejected.connect(
        lambda message=None, exc=None, **_: note(message, exc or "no task"), weak=False
    )
    signals.task_unknown.connect(
        lambda message=None, name="", **_: note(message, f"no task {name!r}"), weak=False
    )


Note = Callable[[kombu.Message, object], None]


def _guarded(
    handle: Callable[[kombu.Message], object], lost: tuple[type[Exception], ...], note: Note
) -> Callable[[kombu.Message], None]:
    """`lost`: errors of the connection, by which Celery knows that it must connect anew."""

    def handle_guarded(message: kombu.Message) -> None:
        try:
            handle(message)
        except lost:
            raise
        except Exception as error:  # the outermost frame of a message
            _drop(message, error, note)

    return handle_guarded


def _drop(message: kombu.Message, error: Exception, note: Note) -> None:
    note(message, error)
    if not message.acknowledged:
        message.ack()
