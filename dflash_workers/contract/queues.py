"""Redis as whoever looks at it sees it: the connection, its errors as ours, what a queue holds.

Under hints.py, which sends, and under every other module that speaks to Redis. Loads no Celery and
no kombu: most of what a short look at a fleet takes would be their loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson
import redis
import redis.exceptions

import celeryconfig
from dflash_workers.contract.errors import AccessDenied, BadUsage, QueueUnavailable
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.settings import Settings

_READ_AT_ONCE = 1000  # messages of about 1 KB


@dataclass(frozen=True, slots=True)
class Queues:
    """Looks at queues. Safe to share between threads."""

    redis: redis.Redis
    keys: RedisKeys
    where: str  # a URL without its password

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


def open_queues(settings: Settings) -> Queues:
    """Who looks, from settings. Connects lazily."""
    client = open_redis(settings)
    return Queues(client, RedisKeys(settings.redis_prefix), settings.public_redis_url())


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


@contextmanager
def translated_redis(where: str) -> Iterator[None]:
    """Redis' errors as ours. `where` is a URL without its password."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise AccessDenied(
            f"Redis at {where} refused the password: check DFLASH_REDIS_URL"
        ) from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise QueueUnavailable(f"Redis at {where} can't be reached: {first_line(error)}") from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            raise AccessDenied(f"Redis at {where} refused: {first_line(error)}") from error
        if str(error).startswith("OOM"):
            raise QueueUnavailable(f"Redis at {where} is full (maxmemory)") from error
        raise QueueUnavailable(f"Redis at {where} answered: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Of a library's words, which may be a page."""
    return str(error).split("\n", 1)[0]


def _lists_of(queue: str) -> list[str]:
    """kombu's Redis lists of a queue, one per priority step."""
    steps = celeryconfig.PRIORITY_STEPS
    return [queue if step == 0 else f"{queue}\x06\x16{step}" for step in steps]


def _id_in(message: bytes | str) -> str:
    try:
        return str(orjson.loads(message)["headers"]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""  # not of our making
