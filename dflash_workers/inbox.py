"""What Celery receives and can't read: counted, kept for people, and never the end of a worker.

Hooked in by worker. kombu reads a queue's entry within its event loop, and Celery a message within
its consumer: what either can't read would end the worker, or be put back for the next one to end of
it. So a look at each entry comes first, in redis-py's place for looking at replies: one that kombu
could make no message of is taken for no reply at all, which BRPOP gives every second. What is a
message, and no hint, is stopped where Celery hands it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import celery
import kombu
from celery import bootsteps, signals
from kombu.utils.json import loads

from dflash_workers.contract.errors import Corrupt
from dflash_workers.dead_letters import bury
from dflash_workers.worksite import UNREADABLE, Site

log = logging.getLogger(__name__)

MESSAGE = "message"  # the dead letters' reason


def guard_inbox(app: celery.Celery, site: Site) -> None:
    """Have this app's consumer survive, count and keep what it can't read."""

    def note_entry(entry: bytes, error: object) -> None:
        site.tally.add(UNREADABLE)
        bury(MESSAGE, entry, error, site)

    def note(message: kombu.Message, error: object) -> None:
        site.tally.add(UNREADABLE)
        bury(MESSAGE, {"headers": message.headers, "body": message.body}, error, site)

    class Inbox(bootsteps.StartStopStep):
        """Made with Celery's consumer; started with each of its connections, before it reads."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer: Any, **options: Any) -> None:
            super().__init__(consumer, **options)
            lost = (*consumer.connection_errors, *consumer.channel_errors)
            make_handler = consumer.create_task_handler
            consumer.create_task_handler = lambda: _guarded(make_handler(), lost, note)
            consumer.on_decode_error = lambda message, error: _drop(message, error, note)

        def start(self, consumer: Any) -> None:
            channel = consumer.task_consumer.channel
            read = _reading(channel, note_entry)
            channel.client.set_response_callback("BRPOP", read)

    app.steps["consumer"].add(Inbox)
    signals.task_rejected.connect(
        lambda message=None, exc=None, **_: note(message, exc or "no task"), weak=False
    )
    signals.task_unknown.connect(
        lambda message=None, name="", **_: note(message, f"no task {name!r}"), weak=False
    )


Note = Callable[[kombu.Message, object], None]
Reply = tuple[bytes, bytes]  # of BRPOP: list and entry


def _reading(
    channel: Any, note: Callable[[bytes, object], None]
) -> Callable[[Reply | None], Reply | None]:
    """`channel`: kombu's, whose client's replies are looked at."""

    def read(reply: Reply | None, **_options: object) -> Reply | None:
        if not reply:
            return None
        name, entry = reply
        try:
            _check(entry, channel)
        except Exception as error:  # the outermost frame of an entry
            note(entry, error)
            return None
        return name, entry

    return read


def _check(entry: bytes, channel: Any) -> None:
    """Raise whatever kombu would, from the entry to its place among those that aren't acked."""
    message = channel.message_to_python(loads(entry.decode()))
    wanted = (
        message.delivery_tag,
        message.delivery_info["exchange"],
        message.delivery_info["routing_key"],
    )
    if not all(isinstance(value, str) for value in wanted):
        raise Corrupt(f"delivery tag, exchange and routing key are {wanted!r}")


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
