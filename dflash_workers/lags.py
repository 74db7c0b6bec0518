"""How far trainers are: behind the shards, by their order logs, and in their steps.

Asked by status. An order's entry tells how many shards it and those before it name, so the last one
alone is read; it is found by its number, with a few requests whatever there are. Of the file with a
line per step the end is read, where it has grown.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store

_LINE_BYTES = 8192  # of a step: the last line is whole in as many
_NO_STEPS = (0, 0)


@dataclass(frozen=True, slots=True)
class Lag:
    """One trainer's."""

    name: str
    num_shards: int  # named in its order
    num_behind: int  # shards that are there and not named
    step: int = 0  # as of the last checkpoint that is in S3
    num_steps: int = 0  # asked for; 0: no checkpoint yet
    is_finished: bool = False  # it has taken all its steps, and waits for no shard


class Orders:
    """Of one run. Remembers how far each was."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._last: dict[str, int] = {}  # trainer's name -> number of its last entry seen
        self._steps: dict[str, tuple[int, tuple[int, int]]] = {}  # name -> bytes, what they said

    def lags(self, num_shards: int) -> list[Lag]:
        """Of all trainers, where so many shards are there. Raises StoreUnavailable."""
        lags = []
        for name in self._store.folders(RunKeys(self._run).train("").removesuffix("/")):
            named, (step, num_steps) = self._num_named(name), self._step(name)
            if named is None and not num_steps:
                continue  # others keep things there, too
            is_finished = 0 < num_steps <= step
            num_behind = 0 if is_finished else max(num_shards - (named or 0), 0)
            lags.append(Lag(name, named or 0, num_behind, step, num_steps, is_finished))
        return lags

    def _num_named(self, name: str) -> int | None:
        """None where the trainer keeps no order."""
        number = self._last.get(name, -1)
        step = 1
        while self._store.exists(self._key(name, number + step)):
            number += step
            step *= 2
        while step > 1:
            step //= 2
            if self._store.exists(self._key(name, number + step)):
                number += step
        if number < 0:
            return None
        self._last[name] = number
        try:
            entry = orjson.loads(self._store.get(self._key(name, number)))
        except (Missing, orjson.JSONDecodeError):
            return None
        return int(entry["num_shards"]) if "num_shards" in entry else None

    def _step(self, name: str) -> tuple[int, int]:
        """Taken and asked for, as far as S3 knows."""
        key = f"{RunKeys(self._run).train(name)}metrics.jsonl"
        num_bytes = next((size for found, size in self._store.list(key) if found == key), 0)
        known, steps = self._steps.get(name, (0, _NO_STEPS))
        if num_bytes != known:
            steps = self._last_step(key, num_bytes)
            self._steps[name] = num_bytes, steps
        return steps

    def _last_step(self, key: str, num_bytes: int) -> tuple[int, int]:
        begin = max(num_bytes - _LINE_BYTES, 0)
        try:
            lines = self._store.get_range(key, begin, num_bytes - begin).splitlines()
            record = orjson.loads(lines[-1])
            return int(record["step"]), int(record["num_steps"])
        except (Missing, LookupError, TypeError, orjson.JSONDecodeError):
            return _NO_STEPS

    def _key(self, name: str, number: int) -> str:
        return RunKeys(self._run).order_entry(name, number)
