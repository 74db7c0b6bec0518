"""Who joined the fleet, who left it and who died in it, as one process sees it in the heartbeats.

Called by progress in every worker and by the exporter; the one that holds the lease `observer`
looks, every few seconds, and writes events (contract/events.py). A worker that says goodbye takes
its heartbeat away; one that dies lets it lapse: so a heartbeat that is gone before its time was a
goodbye. What was seen last stands in Redis, for the next observer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

import orjson
import redis
import redis.exceptions
import redis.lock

from dflash_workers.contract.events import (
    DIED,
    JOINED,
    LEFT,
    REPLACED,
    SAMPLE,
    STATE,
    note_events,
)
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.records import Json
from dflash_workers.heartbeats import Beat, figures_of, read_beats

LOOK_EVERY_S = 5.0
SAMPLE_EVERY_S = 60.0
_LEASE_S = 15
_SLACK_S = 1.0  # two looks of one second are rounded


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker at the observer's last look."""

    process: str
    state: str
    at_s: float  # by the observer's clock, since the epoch
    lapses_s: float  # from then


class Roll:
    """One process' part. Raises redis-py's errors."""

    def __init__(
        self, client: redis.Redis, keys: RedisKeys, *, every_s: float = LOOK_EVERY_S
    ) -> None:
        self._client, self._keys, self._every_s = client, keys, every_s
        self._looked_s = self._sampled_s = -SAMPLE_EVERY_S
        self._lease = redis.lock.Lock(client, keys.observer, timeout=_LEASE_S, thread_local=False)

    def look(self) -> None:
        """See who is there, where it is this process' turn. May be called at any time."""
        if time.monotonic() - self._looked_s < self._every_s:
            return
        self._looked_s = time.monotonic()
        if self._is_mine():
            beats = read_beats(self._client, self._keys)
            events = [*self._changes(beats), *self._sample(beats)]
            if events:
                note_events(self._client, self._keys, events)

    def leave(self) -> None:
        """Let another observe at once."""
        if self._lease.owned():
            self._lease.release()

    def _changes(self, beats: list[Beat]) -> list[tuple[str, str, Json]]:
        now_s, before = time.time(), self._seen()
        here = {
            beat.slot: Seen(beat.process, beat.state, now_s, beat.lapses_s)
            for beat in beats
            if beat.process  # else it beats for the first time just now
        }
        with self._client.pipeline() as transaction:
            transaction.delete(self._keys.roll)
            for slot, seen in here.items():
                transaction.hset(self._keys.roll, slot, orjson.dumps(asdict(seen)))
            transaction.execute()
        return [*_departures(before, here, now_s), *_arrivals(before, here)]

    def _seen(self) -> dict[str, Seen]:
        known = cast("dict[bytes, bytes]", self._client.hgetall(self._keys.roll))
        return {slot.decode(): Seen(**orjson.loads(body)) for slot, body in known.items()}

    def _sample(self, beats: list[Beat]) -> list[tuple[str, str, Json]]:
        if time.monotonic() - self._sampled_s < SAMPLE_EVERY_S:
            return []
        self._sampled_s = time.monotonic()
        return [(SAMPLE, "", figures_of(beats))]

    def _is_mine(self) -> bool:
        try:
            if self._lease.owned():
                return bool(self._lease.reacquire())
            return bool(self._lease.acquire(blocking=False))
        except redis.exceptions.LockError:  # lapsed between the two
            return False


def _departures(
    before: dict[str, Seen], here: dict[str, Seen], now_s: float
) -> Iterable[tuple[str, str, Json]]:
    for slot, seen in before.items():
        if slot not in here:
            is_early = now_s < seen.at_s + seen.lapses_s - _SLACK_S
            yield LEFT if is_early else DIED, slot, {"process": seen.process}


def _arrivals(before: dict[str, Seen], here: dict[str, Seen]) -> Iterable[tuple[str, str, Json]]:
    for slot, seen in here.items():
        facts = {"process": seen.process, "state": seen.state}
        former = before.get(slot)
        if former is None:
            yield JOINED, slot, facts
        elif former.process != seen.process:
            yield REPLACED, slot, facts
        elif former.state != seen.state:
            yield STATE, slot, facts
