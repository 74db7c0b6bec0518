"""Messages that can never be worked on, kept for people: the newest of each reason, and why.

From <- tasks (hints of no plan or schema) and inbox (what isn't even a hint); read with `redis-cli
lrange`. Nothing is lost by it: no claim was made, so a batch that is planned comes back by itself.
"""

from __future__ import annotations

import json
import logging
import time

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.keys import DEAD_KEPT
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import Json
from dflash_workers.worksite import Site

log = logging.getLogger(__name__)

_KEPT_CHARS = 20_000  # of bytes that nobody can read; a hint has 1,000


def bury(reason: str, letter: Json | bytes, error: object, site: Site) -> None:
    """Keep a letter under `reason`. With Redis away it is in the log alone."""
    kept = _as_text(letter) if isinstance(letter, bytes) else letter
    log.error("dead letter (%s): %s: %.1000s", reason, error, kept)
    # Not orjson, which refuses half a surrogate pair, as a garbled message may hold.
    body = json.dumps({"message": kept, "error": f"{error}", "at": time.time()}, default=_as_text)
    key = site.hints.keys.dead(reason)
    try:
        with translated_redis(site.hints.where):
            site.hints.redis.lpush(key, body)
            site.hints.redis.ltrim(key, 0, DEAD_KEPT - 1)
    except FleetError as not_kept:
        log.warning("dead letter not kept: %s", not_kept)


def _as_text(value: object) -> str:
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else repr(value)
    return text[:_KEPT_CHARS]
