"""What Celery or kombu can't read ends nothing but itself, and is kept for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import celery
import kombu
import orjson
import pytest
import redis
import redis.exceptions
from celery import signals

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage
from dflash_workers.inbox import MESSAGE, guard_inbox
from dflash_workers.worksite import UNREADABLE, Tally
from tests.batches import cut_off

QUEUE = "generate.test-inbox"


class Consumer:
    """As much of Celery's as its bootsteps see."""

    connection_errors = (ConnectionError,)
    channel_errors = ()

    def __init__(self, error: Exception | None = None, channel: Any = None) -> None:
        self.error = error
        self.task_consumer = SimpleNamespace(channel=channel)

    def create_task_handler(self) -> Any:
        def handle(_message: kombu.Message) -> None:
            assert self.error
            raise self.error

        return handle

    def on_decode_error(self, _message: kombu.Message, _error: Exception) -> None:
        raise AssertionError("not called any more")


class Message:
    """As much of kombu's as is looked at."""

    headers: dict[str, object] = {"id": "1"}  # noqa: RUF012
    body = b"\xff%%%"

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


@pytest.fixture
def site(hints: Hints) -> Any:
    """As much of a worker's as the inbox uses."""
    return SimpleNamespace(tally=Tally(), hints=hints)


def hooked(app: celery.Celery, site: Any, error: Exception) -> Any:
    """A consumer with our step applied to it."""
    guard_inbox(app, site)
    consumer = Consumer(error)
    (step,) = app.steps["consumer"]
    step(consumer)
    return consumer


def letters(client: redis.Redis, hints: Hints) -> list[Any]:
    return [json.loads(letter) for letter in client.lrange(hints.keys.dead(MESSAGE), 0, -1)]


def test_a_message_whose_reading_fails_is_counted_kept_and_acked(
    app: celery.Celery, site: Any, hints: Hints, redis_client: redis.Redis
) -> None:
    message = Message()
    consumer = hooked(app, site, TypeError("a bytes-like object is required"))

    consumer.create_task_handler()(message)

    assert site.tally[UNREADABLE] == 1
    assert message.acknowledged
    (letter,) = letters(redis_client, hints)
    assert letter["message"] == {"headers": {"id": "1"}, "body": "\\xff%%%"}
    assert letter["error"] == "a bytes-like object is required"


def test_a_lost_connection_is_left_to_celery(app: celery.Celery, site: Any) -> None:
    message = Message()
    consumer = hooked(app, site, ConnectionResetError())

    with pytest.raises(ConnectionResetError):
        consumer.create_task_handler()(message)

    assert site.tally[UNREADABLE] == 0
    assert not message.acknowledged


def test_what_celery_refuses_by_itself_is_counted_too(app: celery.Celery, site: Any) -> None:
    message = Message()
    consumer = hooked(app, site, TypeError())

    consumer.on_decode_error(message, ValueError("not JSON"))
    signals.task_rejected.send(sender=consumer, message=message, exc=None)
    signals.task_unknown.send(sender=consumer, message=message, exc=None, name="nobody's", id="1")

    assert site.tally[UNREADABLE] == 3


def test_with_redis_away_what_cannot_be_read_is_dropped_all_the_same(
    app: celery.Celery, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    message = Message()
    consumer = hooked(app, site, TypeError("unreadable"))
    cut_off(site.hints.redis)

    consumer.create_task_handler()(message)

    assert message.acknowledged
    assert "%%%" in caplog.text


def envelope(**changes: object) -> bytes:
    """An entry as kombu writes it, with some of it otherwise."""
    properties = {
        "delivery_tag": "tag",
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "body_encoding": "base64",
    }
    whole = {"body": "e30=", "headers": {}, "properties": properties} | changes
    return orjson.dumps(whole | {"content-type": "application/json", "content-encoding": "utf-8"})


# Each of them ends a consumer of kombu's.
UNREADABLES = {
    "no text": b"\xff\xfe\x00garbage",
    "nothing": b"",
    "no JSON": b"{not json",
    "cut off": envelope()[:-20],
    "no object": b"[1, 2]",
    "null": b"null",
    "half a surrogate pair": b'"\\ud800"',
    "so deep that no stack is enough": b"[" * 100_000,
    "no envelope": b'{"run": "r", "segment": 0}',
    "no properties": envelope(properties={}),
    "no routing": envelope(properties={"delivery_tag": "tag"}),
    "a tag that Redis refuses": envelope(
        properties={"delivery_tag": {}, "delivery_info": {"exchange": "", "routing_key": "q"}}
    ),
    "headers that are none": envelope(headers=[1]),
    "a body that is none": envelope(body=17),
}


def consume_one(hints: Hints, app: celery.Celery, site: Any, entry: bytes) -> Any:
    """What comes after the entry, over a real connection with a guarded inbox."""
    queue = f"{QUEUE}{hints.keys.prefix}"
    hints.redis.lpush(queue, entry)
    hints.give_back(BatchMessage("r", 0, "b"), queue)
    bodies: list[Any] = []

    def take(body: Any, message: kombu.Message) -> None:
        message.ack()
        bodies.append(body)

    with hints.app.connection_for_read() as connection, connection.channel() as channel:
        if site is not None:
            guard_inbox(app, site)
            (step,) = app.steps["consumer"]
            consumer = Consumer(channel=channel)
            step(consumer).start(consumer)
        reader = kombu.Consumer(channel, [kombu.Queue(queue)], accept=["json"])
        reader.register_callback(take)
        with reader:
            while not bodies:
                connection.drain_events(timeout=5)
    return bodies[0]


@pytest.mark.parametrize("entry", UNREADABLES.values(), ids=UNREADABLES.keys())
def test_an_entry_that_is_no_message_is_kept_and_the_next_message_is_read(
    app: celery.Celery, site: Any, hints: Hints, redis_client: redis.Redis, entry: bytes
) -> None:
    body = consume_one(hints, app, site, entry)

    assert body[1]["batch"] == "b"
    assert site.tally[UNREADABLE] == 1
    (letter,) = letters(redis_client, hints)
    assert letter["message"] == entry.decode(errors="backslashreplace")[:20_000]
    assert letter["error"]


@pytest.mark.parametrize("entry", UNREADABLES.values(), ids=UNREADABLES.keys())
def test_without_the_look_at_each_entry_kombu_would_end(
    app: celery.Celery, hints: Hints, entry: bytes
) -> None:
    errors = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

    with pytest.raises((*errors, redis.exceptions.DataError)):
        consume_one(hints, app, None, entry)
