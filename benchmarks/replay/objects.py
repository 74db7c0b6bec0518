"""The S3 side of the recording: what a batch asks for, and a crowd that asks for as much.

From <- recording.py's requests; used by __main__. A batch's requests go one after the other, as a
worker sends them, under keys of their own; looks at the run's control log come by the clock. What
is measured is the store's CPU time, since it and the crowd share a machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import psutil
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from benchmarks.replay.recording import Asked
from dflash_workers.contract.settings import Settings

_CONTROL = re.compile(r"/control/\d+\.json$")
_KINDS = {  # of a batch's requests, in their order
    "prompts": re.compile(r"/plan/prompts/"),
    "commit": re.compile(r"/commits/\d+/[^/]+\.json$"),
    "data": re.compile(r"/data/\d+/"),
}
_TIMEOUT_S = 30.0
_MISSING, _WRITTEN = 404, 200


@dataclass(frozen=True, slots=True)
class Mix:
    """What a worker asks of S3."""

    num_batches: int  # recorded
    requests_per_batch: float  # control's look at each claim among them
    puts_per_batch: float
    data_bytes: int  # of a batch's data object, in the mean
    commit_bytes: int
    looks_per_s: float  # at the control log, besides


@dataclass(frozen=True, slots=True)
class StoreCost:
    """What a crowd cost the store."""

    num_workers: int
    batches_per_s: float  # done, of all workers
    wanted_batches_per_s: float
    requests_per_s: float
    puts_per_s: float
    cpu_share: float  # of one core
    request_p50_ms: float
    request_p99_ms: float


def mix_of(requests: Sequence[Asked], from_s: float, to_s: float) -> Mix:
    """Of what was asked between the two times. Raises ValueError with no batch in it."""
    asked = [one for one in requests if from_s <= one.at_s < to_s]
    data = [one.body_bytes for one in asked if _is(one, "data", "PUT")]
    commits = [one.body_bytes for one in asked if _is(one, "commit", "PUT")]
    if not commits:
        raise ValueError("no batch was committed while it was recorded: record for longer")
    num_looks = sum(bool(_CONTROL.search(one.path)) for one in asked)
    num_others = sum(any(kind.search(one.path) for kind in _KINDS.values()) for one in asked)
    num_batches = len(commits)
    return Mix(
        num_batches=num_batches,
        requests_per_batch=1 + num_others / num_batches,
        puts_per_batch=(len(data) + len(commits)) / num_batches,
        data_bytes=sum(data) // num_batches,
        commit_bytes=sum(commits) // num_batches,
        looks_per_s=max(num_looks - num_batches, 0) / (to_s - from_s),
    )


def measure_store(
    settings: Settings, mix: Mix, num_workers: int, batches_per_s: float, seconds: float
) -> StoreCost:
    """Have so many workers do so many batches a second, all together."""
    store = _Asker(settings)
    weed = _store_process()
    before_s = sum(weed.cpu_times()[:2])
    length_s, num_done = asyncio.run(_crowd(store, mix, num_workers, batches_per_s, seconds))
    took_ms = sorted(store.took_ms)
    return StoreCost(
        num_workers=num_workers,
        batches_per_s=num_done / length_s,
        wanted_batches_per_s=batches_per_s,
        requests_per_s=len(took_ms) / length_s,
        puts_per_s=store.num_puts / length_s,
        cpu_share=(sum(weed.cpu_times()[:2]) - before_s) / length_s,
        request_p50_ms=took_ms[len(took_ms) // 2],
        request_p99_ms=took_ms[len(took_ms) * 99 // 100],
    )


class _Asker:
    """Signs and sends."""

    def __init__(self, settings: Settings) -> None:
        keys = Credentials(settings.s3_access_key, settings.s3_secret_key)
        self.took_ms: list[float] = []
        self.num_puts = 0
        self._signer = S3SigV4Auth(keys, "s3", settings.s3_region)
        self._root = f"{settings.s3_endpoint}/{settings.s3_bucket}/replayed"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> _Asker:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session
        await self._session.close()

    async def ask(self, method: str, key: str, expected: int, body: bytes = b"") -> None:
        """Raises RuntimeError where the store answers otherwise."""
        assert self._session
        url = f"{self._root}/{key}"
        headers = {"Host": urlsplit(url).netloc}
        if method == "PUT":
            headers["If-None-Match"] = "*"
            self.num_puts += 1
        request = AWSRequest(method=method, url=url, data=body, headers=headers)
        self._signer.add_auth(request)
        began_s = time.monotonic()
        async with self._session.request(
            method, url, data=body or None, headers=dict(request.headers.items())
        ) as reply:
            await reply.read()
        self.took_ms.append((time.monotonic() - began_s) * 1e3)
        if reply.status != expected:
            raise RuntimeError(f"{method} {key}: {reply.status}, expected {expected}")


async def _crowd(
    store: _Asker, mix: Mix, num_workers: int, batches_per_s: float, seconds: float
) -> tuple[float, int]:
    """How long it took, and how many batches were done."""
    every_s = num_workers / batches_per_s
    turn = f"{time.time_ns():x}"
    prompts = f"{turn}/prompts"
    async with store:
        await store.ask("PUT", prompts, _WRITTEN, os.urandom(mix.data_bytes // 8))
        store.took_ms.clear()
        store.num_puts = 0
        began_s = time.monotonic()
        until_s = began_s + seconds
        workers = [
            _batches(
                store, mix, f"{turn}/{n}", (began_s + every_s * n / num_workers, until_s), every_s
            )
            for n in range(num_workers)
        ]
        looks = [_looks(store, mix, n / num_workers, until_s) for n in range(num_workers)]
        done = await asyncio.gather(*workers, *looks)
        # The last batch is begun, and may be done, before the time is over.
        return max(time.monotonic() - began_s, seconds), sum(done)


async def _batches(
    store: _Asker, mix: Mix, name: str, times_s: tuple[float, float], every_s: float
) -> int:
    """One worker's, from the first time until the second; how many it did."""
    due_s, until_s = times_s
    data, commit = os.urandom(mix.data_bytes), os.urandom(mix.commit_bytes)
    prompts = f"{name.partition('/')[0]}/prompts"
    num_done = 0
    while due_s < until_s:
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        if time.monotonic() > until_s:
            break
        batch = f"{name}/{num_done}"
        await store.ask("GET", f"{batch}/control", _MISSING)
        await store.ask("GET", prompts, _WRITTEN)
        await store.ask("GET", f"{batch}/commit", _MISSING)
        await store.ask("PUT", f"{batch}/data", _WRITTEN, data)
        await store.ask("PUT", f"{batch}/commit", _WRITTEN, commit)
        num_done += 1
        due_s += every_s
    return num_done


async def _looks(store: _Asker, mix: Mix, phase: float, until_s: float) -> int:
    """One worker's looks at the control log; no batch is done by them."""
    every_s = 1 / max(mix.looks_per_s, 1e-9)
    due_s = time.monotonic() + phase * every_s
    while due_s < until_s:
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        if time.monotonic() > until_s:
            break
        await store.ask("GET", "control/000000.json", _MISSING)
        due_s += every_s
    return 0


def _is(one: Asked, kind: str, method: str) -> bool:
    return one.method == method and bool(_KINDS[kind].search(one.path))


def _store_process() -> psutil.Process:
    """SeaweedFS, which this process has started."""
    return next(p for p in psutil.Process().children(recursive=True) if p.name() == "weed")
