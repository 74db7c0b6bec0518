"""The workers' heartbeats, as whoever watches the fleet reads them.

Written by vitals and, what the engine tells of itself, by engine_load; read by status, roll and the
exporter. A heartbeat lapses WORKER_S after its worker's last, so that a dead worker is never shown
for longer, whatever Celery's events say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis

from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.records import Json

_FIGURES = ("in_flight", "max_in_flight", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class Beat:
    """One worker's. What it doesn't tell is absent from `facts`."""

    slot: str
    facts: Json  # as it wrote them, numbers as numbers
    lapses_s: float

    @property
    def process(self) -> str:
        return str(self.facts.get("process", ""))

    @property
    def state(self) -> str:
        """up | draining | paused: and why."""
        return str(self.facts.get("state", ""))

    @property
    def kind(self) -> str:
        """up | draining | paused."""
        return self.state.partition(":")[0]

    def number(self, name: str) -> float | None:
        """None where it isn't told."""
        value = self.facts.get(name)
        return value if isinstance(value, float) else None


def read_beats(client: redis.Redis, keys: RedisKeys) -> list[Beat]:
    """By slot. Raises redis-py's errors."""
    prefix = keys.worker("")
    found = sorted(client.scan_iter(match=f"{prefix}*", count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in found:
            pipe.hgetall(key)
            pipe.pttl(key)
        replies = pipe.execute()
    beats = []
    for key, facts, lapses_ms in zip(found, replies[::2], replies[1::2], strict=True):
        if lapses_ms > 0:  # else it lapsed between the two
            read = {k.decode(): _value(v) for k, v in cast("dict[bytes, bytes]", facts).items()}
            beats.append(Beat(key.decode().removeprefix(prefix), read, lapses_ms / 1000))
    return beats


def figures_of(beats: Sequence[Beat]) -> Json:
    """The fleet's sums, and of what the engines tell the fullest and the mean."""
    figures: Json = {"workers": dict(Counter(beat.kind for beat in beats))}
    for name in _FIGURES:
        figures[name] = sum(beat.number(name) or 0.0 for beat in beats)
    kv_uses = [use for beat in beats if (use := beat.number("kv_use")) is not None]
    lengths = [length for beat in beats if (length := beat.number("accept_length")) is not None]
    figures["kv_use"] = max(kv_uses, default=None)
    figures["accept_length"] = sum(lengths) / len(lengths) if lengths else None
    return figures


def _value(text: bytes) -> Any:
    try:
        return float(text)
    except ValueError:
        return text.decode(errors="replace")
