"""A batch seen from outside: hint it to a worker, wait, look what S3 and Redis hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis

from dflash_workers.contract.commit import committed_batches, read_commit
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import BatchMessage, Commit, encode
from dflash_workers.contract.store import Store
from dflash_workers.tasks import take
from dflash_workers.worker import Worker

MakeWorker = Callable[..., Worker]


def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def work(worker: Worker, message: BatchMessage) -> threading.Thread:
    """Take the hint in a thread, as Celery's pool does."""
    thread = threading.Thread(
        target=take, args=(encode(message), worker.site), kwargs={"pause_s": 0.1}
    )
    thread.start()
    return thread


def commit_of(store: Store, message: BatchMessage) -> Commit:
    return read_commit(store, message.run, message.segment, message.batch)


def is_committed(store: Store, message: BatchMessage) -> bool:
    return store.exists(RunKeys(message.run).commit(message.segment, message.batch))


def is_committed_once(store: Store, message: BatchMessage) -> bool:
    at = (message.segment, message.batch)
    return [a for a in committed_batches(store, message.run) if a == at] == [at]


def left_in_redis(client: redis.Redis, hints: Hints) -> list[str]:
    keys = [key.decode() for key in client.scan_iter(f"{hints.keys.prefix}*")]
    beside = (":worker:", ":progress:", ":events", ":roll", ":observer")
    return [key for key in keys if not any(part in key for part in beside)]


def cut_off(client: redis.Redis) -> None:
    """Have the client find nobody at Redis' address from now on."""
    client.connection_pool.connection_kwargs["port"] = 1
    client.connection_pool.disconnect()
    client.connection_pool.reset()  # else old connections would be made anew, with the old port
