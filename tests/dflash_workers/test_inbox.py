"""A message that Celery can't read ends nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celery
import kombu
import pytest
from celery import signals

from dflash_workers.inbox import count_unreadable
from dflash_workers.worksite import UNREADABLE, Tally


class Consumer:
    """As much of Celery's as its bootsteps see before it connects."""

    connection_errors = (ConnectionError,)
    channel_errors = ()

    def __init__(self, error: Exception) -> None:
        self.error = error

    def create_task_handler(self) -> Any:
        def handle(_message: kombu.Message) -> None:
            raise self.error

        return handle

    def on_decode_error(self, _message: kombu.Message, _error: Exception) -> None:
        raise AssertionError("not called any more")


class Message:
    """As much of kombu's as is looked at."""

    body = b"%%%"

    def __init__(self) -> None:
        self.acknowledged = False

    def ack(self) -> None:
        assert not self.acknowledged
        self.acknowledged = True


@pytest.fixture
def app() -> Iterator[celery.Celery]:
    """Its signals end with the test."""
    receivers = {s: list(s.receivers) for s in (signals.task_rejected, signals.task_unknown)}
    yield celery.Celery("test", set_as_current=False)
    for signal, earlier in receivers.items():
        signal.receivers[:] = earlier


def hooked(app: celery.Celery, tally: Tally, error: Exception) -> Any:
    """A consumer with our step applied to it."""
    count_unreadable(app, tally)
    consumer = Consumer(error)
    (step,) = app.steps["consumer"]
    step(consumer)
    return consumer


def test_a_message_whose_reading_fails_is_counted_and_acked(app: celery.Celery) -> None:
    tally, message = Tally(), Message()
    consumer = hooked(app, tally, TypeError("a bytes-like object is required"))

    consumer.create_task_handler()(message)

    assert tally[UNREADABLE] == 1
    assert message.acknowledged


def test_a_lost_connection_is_left_to_celery(app: celery.Celery) -> None:
    tally, message = Tally(), Message()
    consumer = hooked(app, tally, ConnectionResetError())

    with pytest.raises(ConnectionResetError):
        consumer.create_task_handler()(message)

    assert tally[UNREADABLE] == 0
    assert not message.acknowledged


def test_what_celery_refuses_by_itself_is_counted_too(app: celery.Celery) -> None:
    tally, message = Tally(), Message()
    consumer = hooked(app, tally, TypeError())

    consumer.on_decode_error(message, ValueError("not JSON"))
    signals.task_rejected.send(sender=consumer, message=message, exc=None)
    signals.task_unknown.send(sender=consumer, message=message, exc=None, name="nobody's", id="1")

    assert tally[UNREADABLE] == 3
