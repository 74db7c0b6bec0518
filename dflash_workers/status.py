"""What `dflash-fleet status` shows: a run's truth from S3, and what Redis says about who works.

From <- progress.Meter, the run's orders and prices, claims' sets, heartbeats, dead letters; to ->
cli, screen and exporter. An Overview that is kept reads again only what is new, and one that had to
count many commits keeps the count for the next. It writes nothing else.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

import celeryconfig
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import AccessDenied
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.prices import stored_prices
from dflash_workers.contract.queues import Queues, translated_redis
from dflash_workers.contract.records import Json, encode
from dflash_workers.contract.store import Store
from dflash_workers.heartbeats import read_beats
from dflash_workers.lags import Orders
from dflash_workers.progress import RUNNING, Meter
from dflash_workers.throughput import read_noted

NUM_ERRORS = 5
_MANY_COMMITS = 200  # read in less than a second: of a run with workers those of the last seconds


class Overview:
    """One run, looked at again and again."""

    def __init__(self, store: Store, queues: Queues, run: str) -> None:
        """Raises Missing where there is no such run."""
        self.run = run
        self._store, self._queues = store, queues
        self._queue = celeryconfig.generate_queue(read_spec(store, run).target.fingerprint())
        self._meter = Meter(store, run)
        self._control = Control(store, run)
        self._orders = Orders(store, run)

    def read(self) -> Json:
        """Progress by its own names, then what it is made of, then Redis' figures."""
        with translated_redis(self._queues.where):
            noted = read_noted(self._queues.redis, self._queues.keys, self.run)
        state = self._control.state()
        measured, outlook = self._meter.measure_with_outlook(noted)
        self._meter.look_for_shards()
        self._keep_count()
        progress, expected = encode(measured), encode(outlook)
        if state is not RunState.ACTIVE:
            progress["eta_hours"] = expected["eta_low_hours"] = expected["eta_high_hours"] = None
            if progress["status"] == RUNNING:
                progress["status"] = state.value
        return {
            "run": self.run,
            "state": state.value,
            "sealed": self._meter.is_sealed,
            **progress,
            "num_noted": sum(batch.num_prompts for batch in noted),
            **self._queue_figures(),
            **expected,
            **self._counted(),
            "errors": self._errors(),
        }

    def _keep_count(self) -> None:
        """Of a run that no worker counts, such as an imported one, each look would read it all."""
        if self._meter.num_unkept >= _MANY_COMMITS:
            with suppress(AccessDenied):  # who may only read counts again
                self._meter.keep()

    def _queue_figures(self) -> Json:
        queues = self._queues
        with translated_redis(queues.where):
            beats = read_beats(queues.redis, queues.keys)
            return {
                "queue": self._queue,
                "num_queued": queues.num_queued(self._queue),
                "num_pending": int(queues.redis.zcard(queues.keys.pending(self.run))),
                "num_inflight": int(queues.redis.zcard(queues.keys.inflight(self.run))),
                "workers": [{"slot": beat.slot, **beat.facts} for beat in beats],
                "tokenizer_up": bool(queues.redis.exists(queues.keys.tokenizers)),
            }

    def _counted(self) -> Json:
        counted, prices = self._meter.counted, stored_prices(self._store, self.run)
        gpu_hours = counted.busy.gpu_hours()
        num_shards = counted.num_commits - counted.num_untokenized - counted.num_quarantined
        return {
            "rejections": dict(sorted(counted.rejections.items(), key=lambda item: -item[1])),
            "made_again_tokens": counted.notes.get("made_again_tokens", 0),
            "gpu_hours": round(gpu_hours, 4),
            "cost_usd": prices.cost_usd(gpu_hours) if prices else {},
            "num_untokenized": counted.num_untokenized,
            "num_quarantined": counted.num_quarantined,
            "trainers": [asdict(lag) for lag in self._orders.lags(num_shards)],
        }

    def _errors(self) -> list[Json]:
        """The newest letters that nobody can work on, and the newest rejections."""
        errors = [
            {"at": r["at"], "what": f"rejected {r['id']!r}: {r['reason']}: {r['detail']}"}
            for r in self._meter.counted.last_rejections
        ]
        for reason, letters in read_dead(self._queues, NUM_ERRORS).items():
            errors += [
                {"at": letter["at"], "what": f"dead letter ({reason}): {letter['error']}"}
                for letter in letters
            ]
        return sorted(errors, key=lambda error: -error["at"])[:NUM_ERRORS]


def read_status(store: Store, queues: Queues, run: str) -> Json:
    """One look, by a new observer."""
    return Overview(store, queues, run).read()


def read_dead(queues: Queues, num_newest: int) -> dict[str, list[Json]]:
    """The newest dead letters of each reason."""
    prefix = queues.keys.dead("")
    found: dict[str, list[Json]] = {}
    with translated_redis(queues.where):
        for key in queues.redis.scan_iter(match=f"{prefix}*", count=1000):
            letters = queues.redis.lrange(key, 0, num_newest - 1)
            found[key.decode().removeprefix(prefix)] = [json.loads(text) for text in letters]
    return found


def count_dead(queues: Queues) -> dict[str, int]:
    """How many are kept of each reason."""
    prefix = queues.keys.dead("")
    with translated_redis(queues.where):
        keys = list(queues.redis.scan_iter(match=f"{prefix}*", count=1000))
        return {k.decode().removeprefix(prefix): int(queues.redis.llen(k)) for k in keys}
