"""How far trainers are behind the shards: from their order logs, whose entries are numbered.

Asked by status. An order's entry tells how many shards it and those before it name, so the last one
alone is read; it is found by its number, with a few requests whatever there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store


@dataclass(frozen=True, slots=True)
class Lag:
    """One trainer's."""

    name: str
    num_shards: int  # named in its order
    num_behind: int  # shards that are there and not named


class Orders:
    """Of one run. Remembers how far each was."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._last: dict[str, int] = {}  # trainer's name -> number of its last entry seen

    def lags(self, num_shards: int) -> list[Lag]:
        """Of all trainers, where so many shards are there. Raises StoreUnavailable."""
        lags = []
        for name in self._names():
            named = self._num_named(name)
            if named is not None:
                lags.append(Lag(name, named, max(num_shards - named, 0)))
        return lags

    def _names(self) -> Iterator[str]:
        """Those that have written anything, each for one request."""
        prefix = RunKeys(self._run).train("").removesuffix("/")
        after = ""
        while first := next(self._store.list(prefix, after=after), None):
            found = re.match(r"([^/]+)/", first[0].removeprefix(prefix))
            if not found:
                after = first[0]
                continue
            yield found[1]
            after = f"{prefix}{found[1]}0"  # behind everything below "<name>/"

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

    def _key(self, name: str, number: int) -> str:
        return RunKeys(self._run).order_entry(name, number)
