"""What the engines do, read from their workers' heartbeats: windows of time, both sides in each.

Read from Redis every second by -> promoter. A window counts only where the engine that is watched
was full at both its ends, and, where others were full too, is held against those; alone it is held
against nothing, and only before and after can be compared. Counters fall back to zero when a worker
starts anew: such a window is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import cast

import redis

from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.queues import translated_redis
from dflash_workers.heartbeats import Beat, read_beats

FULL_SHARE = 0.8  # of an engine's limit
LEFT_OUT = "not:"  # before a drafter's id, in what a node says


@dataclass(frozen=True, slots=True)
class Served:
    """What a node says of one of its engines."""

    drafter: str  # that it serves now
    is_ready: bool
    entry: int  # of the serving log, that its node has heeded
    why_not: Mapping[str, str]  # drafters that it could not serve


class Fleet:
    """The workers and engines of a run's target, as Redis has them."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, where: str) -> None:
        self._client = client
        self._keys = keys
        self._where = where

    def beats(self) -> dict[str, Beat]:
        """By slot, of workers that are up. Raises QueueUnavailable."""
        with translated_redis(self._where):
            beats = read_beats(self._client, self._keys)
        return {beat.slot: beat for beat in beats if beat.kind == "up"}

    def served(self, run: str) -> dict[str, Served]:
        """By slot, of engines whose nodes follow the run. Raises QueueUnavailable."""
        prefix = self._keys.serves("")
        with translated_redis(self._where):
            names = sorted(self._client.scan_iter(match=f"{prefix}*", count=1000))
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(name)
                replies = cast("list[dict[bytes, bytes]]", pipe.execute())
        found: dict[str, Served] = {}
        for name, reply in zip(names, replies, strict=True):
            facts = {k.decode(): v.decode(errors="replace") for k, v in reply.items()}
            if facts.get("run") == run:
                found[name.decode().removeprefix(prefix)] = _served(facts)
        return found


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds in which the engine that is watched was full."""

    log_ratio: float  # of its tokens/s to the others'; of its tokens/s where there are none
    num_replies: int  # of its own
    against: frozenset[str] = frozenset()  # the others: windows compare where these are the same


def watch(
    read: Callable[[], Mapping[str, Beat]], slot: str, others: frozenset[str], window_s: float
) -> Window | None:
    """The next `window_s` seconds; None where they can't be compared."""
    first = read()
    time.sleep(window_s)
    last = read()
    rates = {
        name: _tokens_per_s(first[name], last[name])
        for name in {slot, *others} & first.keys() & last.keys()
        if _is_steady(first[name], last[name])
    }
    mine = rates.pop(slot, 0.0)
    theirs = fmean(rates.values()) if rates else 1.0
    if mine <= 0 or theirs <= 0 or (others and not rates):
        return None
    num_replies = int(_grown(first[slot], last[slot], "replies"))
    return Window(math.log(mine / theirs), num_replies, frozenset(rates))


def _tokens_per_s(first: Beat, last: Beat) -> float:
    """By the worker's own clock: a heartbeat may be seconds old when it is read."""
    seconds = _grown(first, last, "uptime_s")
    return _grown(first, last, "tokens") / seconds if seconds > 0 else 0.0


def _is_steady(first: Beat, last: Beat) -> bool:
    return first.process == last.process and _is_full(first) and _is_full(last)


def _is_full(beat: Beat) -> bool:
    limit = beat.number("max_in_flight") or math.inf
    return (beat.number("in_flight") or 0.0) >= FULL_SHARE * limit


def _grown(first: Beat, last: Beat, counter: str) -> float:
    return (last.number(counter) or 0.0) - (first.number(counter) or 0.0)


def _served(facts: Mapping[str, str]) -> Served:
    return Served(
        facts.get("drafter", ""),
        facts.get("ready") == "1",
        int(facts.get("entry", -1)),
        {k.removeprefix(LEFT_OUT): v for k, v in facts.items() if k.startswith(LEFT_OUT)},
    )
