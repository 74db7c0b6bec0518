"""How fast a run goes now: prompts per second over the last minutes, the half done batches' too.

Fed by progress with commits, and with what the journals of held batches say; those count because a
batch of a slow target takes longer than the minutes that are looked at. A batch's prompts count as
if they had ended evenly between its start and its end: batches end in bursts, prompts don't. Times
are other machines' clocks; what lies ahead of ours counts as now.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import redis

from dflash_workers.contract.keys import RedisKeys, parse_batch_name

WINDOW_S = 600.0  # the rate follows workers that come and go
_NUM_PARTS = 10  # of the window, each long enough for a few hundred prompts of a small fleet
_PARTIAL = b":partial"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Prompts that ended in the course of some time, in seconds since the epoch."""

    num_prompts: int
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Noted:
    """A batch that is worked on or was left: prompts with a finished turn in its journal."""

    at: tuple[int, str]  # segment and batch
    num_prompts: int
    since_s: float | None  # when its holder claimed it; None: nobody holds it


def prompts_per_s(stretches: Iterable[Stretch], now_s: float) -> float:
    """Over the last WINDOW_S, or since the first of these began. Never negative."""
    recent = [s for s in stretches if s.to_s > now_s - WINDOW_S and s.num_prompts]
    if not recent:
        return 0.0
    since_s = max(now_s - WINDOW_S, min(s.from_s for s in recent))
    num_prompts = sum(s.num_prompts * _share_after(since_s, s, now_s) for s in recent)
    return num_prompts / max(now_s - since_s, 1.0)


def spread_of_rates(stretches: Sequence[Stretch], now_s: float) -> tuple[float, float]:
    """A tenth of the time it was slower than the first, a tenth faster than the second: prompts
    per second in equal parts of the time that prompts_per_s looks at.
    """
    recent = [s for s in stretches if s.to_s > now_s - WINDOW_S and s.num_prompts]
    if not recent:
        return 0.0, 0.0
    since_s = max(now_s - WINDOW_S, min(s.from_s for s in recent))
    part_s = max(now_s - since_s, 1.0) / _NUM_PARTS
    rates = sorted(
        sum(s.num_prompts * _share_within(at_s, at_s + part_s, s, now_s) for s in recent) / part_s
        for at_s in (since_s + number * part_s for number in range(_NUM_PARTS))
    )
    deciles = statistics.quantiles(rates, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _share_within(from_s: float, to_s: float, stretch: Stretch, now_s: float) -> float:
    """How much of the stretch lies between the two; of one without a length, all or nothing."""
    begin_s, end_s = min(stretch.from_s, now_s), min(stretch.to_s, now_s)
    if end_s <= begin_s:
        return 1.0 if from_s < end_s <= to_s else 0.0
    return max(min(end_s, to_s) - max(begin_s, from_s), 0.0) / (end_s - begin_s)


def _share_after(since_s: float, stretch: Stretch, now_s: float) -> float:
    """How much of the stretch lies between the two."""
    to_s = min(stretch.to_s, now_s)
    length_s = to_s - stretch.from_s
    return min((to_s - since_s) / length_s, 1.0) if length_s > 0 else 1.0


def read_noted(client: redis.Redis, keys: RedisKeys, run: str) -> list[Noted]:
    """What the journals of batches in flight hold. Raises redis-py's errors."""
    names = [
        name.decode() for name in cast("list[bytes]", client.zrange(keys.inflight(run), 0, -1))
    ]
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.get(keys.lease(run, name))
            pipe.hkeys(keys.journal(run, name))
        replies = pipe.execute()
    return [
        Noted(parse_batch_name(name), _num_prompts(fields), _claimed_s(attempt))
        for name, attempt, fields in zip(names, replies[::2], replies[1::2], strict=True)
    ]


def _num_prompts(fields: list[bytes]) -> int:
    return len({f.rpartition(b":")[0] for f in fields if not f.endswith(_PARTIAL)})


def _claimed_s(attempt: bytes | None) -> float | None:
    """A UUIDv7 begins with its time, in milliseconds."""
    return (uuid.UUID(attempt.decode()).int >> 80) / 1000 if attempt else None
