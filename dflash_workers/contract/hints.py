"""Hints: the messages that say "this batch may want work", and the set that remembers them.

Sent by the producer (enqueue, reconcile) and by workers that give a batch back. A hint may be lost
or doubled; whoever sends one first puts the batch in `pending:<run>`, unless somebody holds it, so
that a lost hint is noticed. See celeryconfig.py for names and priorities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, islice
from urllib.parse import urlsplit

import celery
import kombu.exceptions
import orjson
import redis
import redis.exceptions

import celeryconfig
from dflash_workers.contract.errors import AccessDenied, BadUsage, QueueUnavailable
from dflash_workers.contract.keys import RedisKeys, batch_name
from dflash_workers.contract.records import BatchMessage, encode
from dflash_workers.contract.settings import Settings

_READ_AT_ONCE = 1000  # messages of about 1 KB

_SENT_AT_ONCE = 100

# KEYS: pending, inflight, then each batch's lease.  ARGV: the batches' names.  Time is Redis' own.
# Returns 1 for each batch that nobody holds: that is pending now.
_MARK_PENDING = """
local now = redis.call('TIME')
local since = now[1] * 1000 + math.floor(now[2] / 1000)
local marked = {}
for i, name in ipairs(ARGV) do
  local held = redis.call('EXISTS', KEYS[i + 2]) == 1 or redis.call('ZSCORE', KEYS[2], name)
  if not held then redis.call('ZADD', KEYS[1], 'NX', since, name) end
  marked[i] = held and 0 or 1
end
return marked
"""


@dataclass(frozen=True, slots=True)
class Hints:
    """Sends hints. Safe to share between threads."""

    redis: redis.Redis
    keys: RedisKeys
    app: celery.Celery
    where: str

    def offer(
        self,
        messages: Iterable[BatchMessage],
        queue: str,
        priority: int = celeryconfig.PRIORITY_ORDINARY,
    ) -> int:
        """Mark each batch pending and send its hint; return how many were sent.

        Takes the messages of one run, a hundred at a time, as they come. What was marked and could
        not be sent any more, `reconcile` finds.
        """
        num_sent = 0
        waiting = iter(messages)
        with translated_redis(self.where), self._sender() as kombu_producer:
            mark = self.redis.register_script(_MARK_PENDING)
            publish = _prepared(self.app, kombu_producer, queue, priority)
            while chunk := list(islice(waiting, _SENT_AT_ONCE)):
                marked = mark(*self._names(chunk))
                with kombu_producer.batch(_SENT_AT_ONCE):  # type: ignore[attr-defined]
                    for message in compress(chunk, marked):
                        publish(message)
                num_sent += sum(marked)
        return num_sent

    def give_back(self, message: BatchMessage, queue: str) -> None:
        """Send a hint that goes first in line; the caller moves the batch in the claims."""
        with translated_redis(self.where), self.app.producer_or_acquire() as kombu_producer:
            self._send(message, queue, celeryconfig.PRIORITY_GIVEN_BACK, kombu_producer)

    def tell_tokenizers(self, messages: Iterable[BatchMessage]) -> int:
        """Say of each batch that it is committed; return how many were told.

        Nothing remembers these hints: what one is lost of, the tokenizers' own sweep finds.
        """
        queue, priority = celeryconfig.TOKENIZE_QUEUE, celeryconfig.PRIORITY_ORDINARY
        num_told = 0
        with translated_redis(self.where), self.app.producer_or_acquire() as kombu_producer:
            task = celeryconfig.TOKENIZE_TASK
            publish = _prepared(self.app, kombu_producer, queue, priority, task)
            for message in messages:
                publish(message)
                num_told += 1
        return num_told

    def announce(self, message: BatchMessage) -> None:
        """Tell the tokenizers of a commit, if any are up: else hints would pile up unread."""
        with translated_redis(self.where):
            is_read = bool(self.redis.exists(self.keys.tokenizers))
        if is_read:
            self.tell_tokenizers([message])

    def num_queued(self, queue: str) -> int:
        """Messages waiting in the queue, all priorities together."""
        with translated_redis(self.where):
            return sum(int(self.redis.llen(name)) for name in _lists_of(queue))

    def queued_names(self, queue: str) -> set[str]:
        """The hints waiting in the queue, each as "<run>/<segment>/<batch>".

        Messages come in on a list's left and leave on its right, so that a reading from the left
        misses none that stays, whatever comes and goes meanwhile.
        """
        names: set[str] = set()
        with translated_redis(self.where):
            for name in _lists_of(queue):
                at = 0
                while chunk := self.redis.lrange(name, at, at + _READ_AT_ONCE - 1):
                    names.update(map(_id_in, chunk))
                    at += len(chunk)
        return names

    def _names(self, messages: list[BatchMessage]) -> tuple[list[str], list[str]]:
        """KEYS and ARGV of the script that marks them pending."""
        run = messages[0].run
        names = [batch_name(message.segment, message.batch) for message in messages]
        leases = [self.keys.lease(run, name) for name in names]
        return [self.keys.pending(run), self.keys.inflight(run), *leases], names

    @contextmanager
    def _sender(self) -> Iterator[kombu.Producer]:
        """A sender of its own connection, because kombu sends a batch in one go only where nothing
        may repeat it: the app's connection would, after a timeout."""
        options = {**celeryconfig.broker_transport_options, "retry_on_timeout": False}
        with kombu.Connection(self.app.conf.broker_url, transport_options=options) as connection:
            yield connection.Producer()

    def _send(
        self, message: BatchMessage, queue: str, priority: int, kombu_producer: kombu.Producer
    ) -> None:
        self.app.send_task(
            celeryconfig.GENERATE_TASK,
            kwargs=encode(message),
            task_id=task_id(message),
            queue=queue,
            priority=priority,
            producer=kombu_producer,
            retry=False,
        )


def task_id(message: BatchMessage) -> str:
    """A hint's id in Celery, which says what it is of: "<run>/<segment>/<batch>"."""
    return f"{message.run}/{batch_name(message.segment, message.batch)}"


def _prepared(
    app: celery.Celery,
    kombu_producer: kombu.Producer,
    queue: str,
    priority: int,
    task: str = celeryconfig.GENERATE_TASK,
) -> Callable[[BatchMessage], None]:
    """Sends hints as `send_task` would, which makes each anew and takes ten times as long."""
    model = app.amqp.create_task_message("", task, argsrepr="()", ignore_result=True)
    _, _, embedded = model.body

    def publish(message: BatchMessage) -> None:
        name = task_id(message)
        kombu_producer.publish(
            orjson.dumps(((), message, embedded)).decode(),
            content_type="application/json",
            content_encoding="utf-8",
            routing_key=queue,
            exchange="",
            priority=priority,
            delivery_mode=2,
            headers={**model.headers, "id": name, "root_id": name, "kwargsrepr": name},
            correlation_id=name,
        )

    return publish


def _lists_of(queue: str) -> list[str]:
    """kombu's Redis lists of a queue, one per priority step."""
    steps = celeryconfig.PRIORITY_STEPS
    return [queue if step == 0 else f"{queue}\x06\x16{step}" for step in steps]


def _id_in(message: bytes | str) -> str:
    try:
        return str(orjson.loads(message)["headers"]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""  # not of our making


def open_redis(settings: Settings, *, timeout_s: float = 30) -> redis.Redis:
    """A client that answers in bytes. Connects lazily: call `check_redis` to find out early."""
    try:
        client = redis.Redis.from_url(
            settings.broker_url,
            decode_responses=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 10),
            socket_keepalive=True,
            health_check_interval=25,
        )
        client.connection_pool.make_connection()  # finds unknown options without connecting
        _check_database(settings.broker_url)
    except (TypeError, ValueError) as error:
        # Not the error's own words: they may hold a part of the password.
        raise BadUsage(
            f"DFLASH_REDIS_URL {settings.public_redis_url()!r} is no Redis URL: write "
            "redis://:PASSWORD@HOST:PORT/0, with /, @ and : in the password percent-encoded"
        ) from error
    return client


def _check_database(url: str) -> None:
    """Raises ValueError. redis-py takes database 0 where the URL names one that there isn't."""
    where = urlsplit(url)
    if where.scheme in ("redis", "rediss") and not re.fullmatch(r"(/\d*)?", where.path):
        raise ValueError(f"database {where.path!r}")


def check_redis(client: redis.Redis, settings: Settings) -> None:
    """Raise now, in one clear line, what the first real call would have raised later."""
    with translated_redis(settings.public_redis_url()):
        client.ping()


def open_hints(settings: Settings) -> Hints:
    """A sender from settings."""
    app = celery.Celery("dflash", broker=settings.broker_url, set_as_current=False)
    app.config_from_object("celeryconfig")
    app.conf.update(broker_url=settings.broker_url)
    return Hints(
        open_redis(settings), RedisKeys(settings.redis_prefix), app, settings.public_redis_url()
    )


@contextmanager
def translated_redis(where: str) -> Iterator[None]:
    """Redis' and kombu's errors as ours. `where` is a URL without its password."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise AccessDenied(
            f"Redis at {where} refused the password: check DFLASH_REDIS_URL"
        ) from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise QueueUnavailable(
            f"Redis at {where} can't be reached: {_first_line(error)}"
        ) from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            raise AccessDenied(f"Redis at {where} refused: {_first_line(error)}") from error
        if str(error).startswith("OOM"):
            raise QueueUnavailable(f"Redis at {where} is full (maxmemory)") from error
        raise QueueUnavailable(f"Redis at {where} answered: {_first_line(error)}") from error
    except kombu.exceptions.KombuError as error:
        raise QueueUnavailable(
            f"Redis at {where} can't be reached: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
