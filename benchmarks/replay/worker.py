"""One real worker beside one simulated engine, recorded while it works off a run.

Called by __main__; gives what was recorded. The recorded worker is an ordinary one
of many: the leases of the one that observes the fleet and of the one that writes progress are held
by nobody in particular, since what these do is done once, however many workers there are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import redis

from benchmarks.fleet_run import (
    Prompts,
    at_engine,
    make_long_context,
    plan_run,
    running_worker,
    simulated_engine,
    until,
    write_prompts,
)
from benchmarks.replay.crowd import RUN
from benchmarks.replay.recording import Asked, HttpParser, Recorded, Recording, RedisParser
from benchmarks.replay.tape import SLOT
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import embedded_services
from producer.api import RunOptions
from producer.enqueue import queue_of
from tests.tiny_model import make_tiny_model

LIMIT = 48  # requests in the engine
MEAN_TOKENS, VARIATION, MAX_TOKENS = 2306, 1.0, 16_000
BATCH_SIZE = 64
STEP_MS = 0.25  # a hundred times as fast as a large model, so that many batches are seen
CONTEXT_LEN = 1 << 16
_SPARE_BATCHES = 32  # more than a worker takes at once
_LONG_S, _LIMIT_S = 3600, 600  # beyond every recording


@contextmanager
def services(folder: Path) -> Iterator[Settings]:
    """Redis and S3 of one's own, and a tiny model."""
    model_dir = make_tiny_model(folder / "model")
    make_long_context(model_dir, CONTEXT_LEN)
    settings = Settings(model=str(model_dir))
    with embedded_services(
        folder / "services", settings, external_redis=False, external_s3=False
    ) as settings:
        yield settings


def record(settings: Settings, folder: Path, num_batches: int) -> Recorded:
    """A worker until it has committed so many; more are planned, so that it never runs out."""
    engine = simulated_engine(
        Path(settings.model),
        folder / "engine.log",
        max_running=LIMIT,
        mean_tokens=MEAN_TOKENS,
        variation=VARIATION,
        step_ms=STEP_MS,
    )
    prompts = Prompts((num_batches + _SPARE_BATCHES) * BATCH_SIZE, 12, BATCH_SIZE)
    file = write_prompts(folder / "prompts.jsonl", prompts)
    with engine as url:
        settings = dataclasses.replace(at_engine(settings, url, RUN, LIMIT), slot=SLOT.decode())
        options = RunOptions(max_new_tokens=MAX_TOKENS, temperature=0.8)
        with plan_run(settings, file, prompts, options) as run:
            queue = queue_of(run.spec)
            return _record(settings, folder, queue, num_batches)


def _record(settings: Settings, folder: Path, queue: str, num_batches: int) -> Recorded:
    keys, zero_s = RedisKeys(settings.redis_prefix), time.monotonic()
    redis_at, s3_at = _address(settings.redis_url), _address(settings.s3_endpoint)
    with (
        open_redis(settings) as client,
        Recording(redis_at, RedisParser, zero_s) as pieces,
        Recording(s3_at, HttpParser, zero_s) as requests,
    ):
        waiting_bytes = _waiting_bytes(client, keys, queue)
        for once in (keys.observer, keys.progress(RUN)):
            client.set(once, "another", ex=_LONG_S)
        recorded = dataclasses.replace(
            settings,
            redis_url=settings.redis_url.replace(f":{redis_at[1]}/", f":{pieces.port}/"),
            s3_endpoint=f"http://127.0.0.1:{requests.port}",
        )
        with running_worker(recorded, folder / "worker.log") as worker:
            until(lambda: _num_commits(requests.kept) >= num_batches, [worker], _LIMIT_S)
            until_s, held_bytes = time.monotonic() - zero_s, _held_bytes(client, keys)
    return Recorded(pieces.kept, requests.kept, until_s, waiting_bytes, held_bytes)


def _waiting_bytes(client: redis.Redis, keys: RedisKeys, queue: str) -> float:
    """Hint and place among those that wait, of one batch."""
    lists = list(client.scan_iter(match=f"{queue}*"))
    taken = sum(client.memory_usage(key, samples=0) or 0 for key in [*lists, keys.pending(RUN)])
    return taken / client.zcard(keys.pending(RUN))


def _held_bytes(client: redis.Redis, keys: RedisKeys) -> float:
    """What is noted of one batch: of some all, of others nothing yet."""
    names = cast("list[bytes]", client.zrange(keys.inflight(RUN), 0, -1))
    of_batches = [keys.journal(RUN, name.decode()) for name in names]
    journals = [client.memory_usage(key, samples=0) or 0 for key in of_batches]
    return sum(journals) / max(len(journals), 1)


def _num_commits(requests: Sequence[Asked]) -> int:
    return sum(asked.method == "PUT" and "/commits/" in asked.path for asked in requests)


def _address(url: str) -> tuple[str, int]:
    where = urlsplit(url)
    return where.hostname or "127.0.0.1", where.port or 80
