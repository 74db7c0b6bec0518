"""How full the engine is and how well it drafts, as it tells itself, every few seconds.

Asked of SGLang's `/v1/loads` (0.5.17), beside all requests; an engine that doesn't know it is asked
again all the same, because another may stand there after a restart. What it tells goes into the
worker's heartbeat, for status, and to the worker's /metrics. Nothing depends on it.
"""

from __future__ import annotations

import logging
import threading
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

import orjson

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings

log = logging.getLogger(__name__)

EVERY_S = 5.0
_TIMEOUT_S = 5.0
_PATH = "/v1/loads?include=core,spec"

# A heartbeat that was taken away stays away.
_ADD = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], unpack(ARGV)) end"


@dataclass(frozen=True, slots=True)
class Load:
    """At one moment; None where the engine doesn't tell."""

    kv_use: float | None = None  # 0 to 1, of the fullest rank
    accept_length: float | None = None  # tokens a verify step, since the engine's start


class EngineLoad:
    """The thread, and what it heard last."""

    def __init__(self, settings: Settings, slot: str, hints: Hints, *, every_s: float = EVERY_S):
        self.load = Load()
        self.max_in_flight = settings.max_in_flight
        self._url = settings.engine_url.rstrip("/") + _PATH
        self._hints, self._key = hints, hints.keys.worker(slot)
        self._add = hints.redis.register_script(_ADD)
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def stop(self) -> None:
        """It may be within a request: it is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.load = ask(self._url)
                self._tell()
            except FleetError:  # Redis is away, which others say
                continue
            except Exception:
                log.exception("unexpected, goes on")

    def _tell(self) -> None:
        facts = {"kv_use": self.load.kv_use, "accept_length": self.load.accept_length}
        told = [x for name, v in facts.items() if v is not None for x in (name, f"{v:.4f}")]
        with translated_redis(self._hints.where):
            self._add(keys=[self._key], args=["max_in_flight", self.max_in_flight, *told])


def ask(url: str) -> Load:
    """What the engine tells; of one that is away or tells nothing, nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as reply:
            ranks: list[Json] = orjson.loads(reply.read())["loads"]
        return Load(
            kv_use=max((float(rank["token_usage"]) for rank in ranks), default=None),
            accept_length=_mean([_accept_length(rank) for rank in ranks]),
        )
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return Load()


def _accept_length(rank: Json) -> float | None:
    told = rank.get("speculative")
    return float(told["accept_length"]) if told else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else None
