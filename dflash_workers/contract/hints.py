"""Hints: the messages that say "this batch may want work", and the set that remembers them.

Sent by the producer (enqueue, reconcile) and by workers that give a batch back. A hint may be lost
or doubled; whoever sends one first puts the batch in `pending:<run>`, unless somebody holds it, so
that a lost hint is noticed. See celeryconfig.py for names and priorities.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import celery
import kombu.exceptions
import redis
import redis.exceptions

import celeryconfig
from dflash_workers.contract.errors import AccessDenied, BadInput, QueueUnavailable
from dflash_workers.contract.keys import RedisKeys, batch_name
from dflash_workers.contract.records import BatchMessage, encode
from dflash_workers.contract.settings import Settings

# KEYS: pending, inflight, lease.  ARGV: batch name.  Time is Redis' own.
_MARK_PENDING = """
if redis.call('EXISTS', KEYS[3]) == 1 or redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'NX', now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
return 1
"""


@dataclass(frozen=True, slots=True)
class Hints:
    """Sends hints. Safe to share between threads."""

    redis: redis.Redis
    keys: RedisKeys
    app: celery.Celery
    where: str

    def offer(self, messages: Iterable[BatchMessage], queue: str) -> int:
        """Mark each batch pending and send its hint; return how many were sent."""
        num_sent = 0
        with translated_redis(self.where), self.app.producer_or_acquire() as kombu_producer:
            mark = self.redis.register_script(_MARK_PENDING)
            for message in messages:
                name = batch_name(message.segment, message.batch)
                keys = [
                    self.keys.pending(message.run),
                    self.keys.inflight(message.run),
                    self.keys.lease(message.run, name),
                ]
                if mark(keys=keys, args=[name]):
                    self._send(message, queue, celeryconfig.PRIORITY_ORDINARY, kombu_producer)
                    num_sent += 1
        return num_sent

    def give_back(self, message: BatchMessage, queue: str) -> None:
        """Send a hint that goes first in line; the caller moves the batch in the claims."""
        with translated_redis(self.where), self.app.producer_or_acquire() as kombu_producer:
            self._send(message, queue, celeryconfig.PRIORITY_GIVEN_BACK, kombu_producer)

    def num_queued(self, queue: str) -> int:
        """Messages waiting in the queue, all priorities together."""
        steps = celeryconfig.PRIORITY_STEPS
        names = [queue if s == 0 else f"{queue}\x06\x16{s}" for s in steps]
        with translated_redis(self.where):
            return sum(int(self.redis.llen(name)) for name in names)

    def _send(
        self, message: BatchMessage, queue: str, priority: int, kombu_producer: kombu.Producer
    ) -> None:
        self.app.send_task(
            celeryconfig.GENERATE_TASK,
            kwargs=encode(message),
            queue=queue,
            priority=priority,
            producer=kombu_producer,
            retry=False,
        )


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
    except (TypeError, ValueError) as error:
        # Not the error's own words: they may hold a part of the password.
        raise BadInput(
            f"DFLASH_REDIS_URL {settings.public_redis_url()!r} is no Redis URL: write "
            "redis://:PASSWORD@HOST:PORT/0, with /, @ and : in the password percent-encoded"
        ) from error
    return client


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
        raise QueueUnavailable(f"Redis at {where} answered: {_first_line(error)}") from error
    except kombu.exceptions.OperationalError as error:
        raise QueueUnavailable(
            f"Redis at {where} can't be reached: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def wait_for(client: redis.Redis, where: str, timeout_s: float) -> None:
    """Block until Redis answers. Raises QueueUnavailable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with translated_redis(where):
                client.ping()
            return
        except QueueUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
