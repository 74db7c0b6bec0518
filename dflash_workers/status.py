"""What `dflash-fleet status` shows: a run's truth from S3, and what Redis says about who works.

From <- progress.Meter, the run's orders, claims' sets, heartbeats; to -> cli. Reads only.
"""

from __future__ import annotations

from typing import Any

import celeryconfig
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.hints import Hints, translated_redis
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import Json, encode
from dflash_workers.contract.store import Store
from dflash_workers.progress import RUNNING, Meter
from dflash_workers.throughput import read_noted


def read_status(store: Store, hints: Hints, run: str) -> Json:
    """Progress by its own names, then the queue's, the claims' and the workers' figures."""
    spec = read_spec(store, run)
    queue = celeryconfig.generate_queue(spec.target.fingerprint())
    with translated_redis(hints.where):
        noted = read_noted(hints.redis, hints.keys, run)
    meter, state = Meter(store, run), Control(store, run).state()
    progress = encode(meter.measure(noted))
    if state is not RunState.ACTIVE:
        progress["eta_hours"] = None
        if progress["status"] == RUNNING:
            progress["status"] = state.value
    with translated_redis(hints.where):
        return {
            "run": run,
            "state": state.value,
            "sealed": meter.is_sealed,
            **progress,
            "num_noted": sum(batch.num_prompts for batch in noted),
            "queue": queue,
            "num_queued": hints.num_queued(queue),
            "num_pending": int(hints.redis.zcard(hints.keys.pending(run))),
            "num_inflight": int(hints.redis.zcard(hints.keys.inflight(run))),
            "workers": _workers(hints),
        }


def _workers(hints: Hints) -> list[Json]:
    prefix = hints.keys.worker("")
    workers = []
    for key in hints.redis.scan_iter(match=f"{prefix}*"):
        facts: dict[bytes, bytes] = hints.redis.hgetall(key)  # type: ignore[assignment]
        slot = key.decode().removeprefix(prefix)
        workers.append({"slot": slot, **{k.decode(): _value(v) for k, v in facts.items()}})
    return sorted(workers, key=lambda worker: str(worker["slot"]))


def _value(text: bytes) -> Any:
    try:
        return float(text)
    except ValueError:
        return text.decode()
