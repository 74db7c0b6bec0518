"""What happened to the workers of a fleet, as a capped stream in Redis, for people and the report.

Written by one observer at a time (dflash_workers/roll.py), read by `report`. A hint like all of
Redis: no count comes from it, and a flush forgets it. Kinds: joined, left (it said goodbye), died
(its heartbeat lapsed), replaced (another process took its slot), state (what it says of itself has
changed) and sample (the fleet's figures, once a minute).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson
import redis

from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.records import Json

NUM_KEPT = 20_000  # two days of samples, and as many comings and goings

JOINED, LEFT, DIED, REPLACED, STATE, SAMPLE = (
    *("joined", "left", "died", "replaced"),
    *("state", "sample"),
)
ENDS = (LEFT, DIED, REPLACED)  # of a worker's time in the fleet


@dataclass(frozen=True, slots=True)
class Event:
    """One entry."""

    at_s: float  # since the epoch, by Redis' clock
    kind: str
    slot: str  # empty: of the fleet
    facts: Json


def note_events(client: redis.Redis, keys: RedisKeys, events: list[tuple[str, str, Json]]) -> None:
    """Add (kind, slot, facts) in this order. Raises redis-py's errors."""
    with client.pipeline(transaction=False) as pipe:
        for kind, slot, facts in events:
            entry: Mapping[Any, Any] = {"kind": kind, "slot": slot, "facts": orjson.dumps(facts)}
            pipe.xadd(keys.events, dict(entry), maxlen=NUM_KEPT, approximate=True)
        pipe.execute()


def read_events(client: redis.Redis, keys: RedisKeys, since_s: float = 0.0) -> list[Event]:
    """The stream's entries, the oldest first. Raises redis-py's errors."""
    first = f"{int(since_s * 1000)}-0" if since_s else "-"
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(keys.events, min=first))
    return [_event(entry_id, fields) for entry_id, fields in entries]


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> Event:
    return Event(
        at_s=int(entry_id.partition(b"-")[0]) / 1000,
        kind=fields[b"kind"].decode(),
        slot=fields[b"slot"].decode(),
        facts=orjson.loads(fields[b"facts"]),
    )
