"""What the engines sampled, from their token log: the word that no part of the system has touched.

Reads what benchmarks/simulated writes into a SQLite file beside it, so that any number of requests
is looked through in flat memory; asked by reasons.py, recovery.py and conclude.py. A token is a
place in the answer to one question, and answers are functions of their questions, so that a place
sampled by two requests was made twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson

CUT_OFF = "cut off"  # the outcome of a request of which the log has no end
ANSWERED = ("stop", "length")
_AT_ONCE = 1000
_TABLES = """
CREATE TABLE request (rid TEXT, engine TEXT, question TEXT, num_given INTEGER, started_s REAL,
    first_s REAL, moved_s REAL, end INTEGER, outcome TEXT);
CREATE TABLE answer (question TEXT, batch TEXT);
"""
_INDEXES = """
CREATE INDEX request_by_question ON request (question, started_s);
CREATE INDEX request_by_engine ON request (engine, started_s);
CREATE INDEX answer_by_question ON answer (question);
CREATE INDEX answer_by_batch ON answer (batch);
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as its engine saw it."""

    rid: str
    engine: str  # its worker's name
    question: str
    num_given: int  # tokens of the answer that came with it
    started_s: float  # wall clock
    first_s: float | None  # when its first token was sampled
    moved_s: float  # when its last one was
    end: int  # place in the answer that it got to
    outcome: str  # stop | length | abort: sent; left: its client was gone; died: its engine

    @property
    def is_answered(self) -> bool:
        """The whole answer was sent."""
        return self.outcome in ANSWERED

    @property
    def num_made(self) -> int:
        return self.end - self.num_given


@dataclass(frozen=True, slots=True)
class Remade:
    """A request that sampled places which others had sampled before it."""

    request: Request
    earlier: list[Request]  # of the same question, in the order of time
    num_tokens: int


class EngineLog:
    """All requests of a campaign. Close it."""

    def __init__(self, database: Path) -> None:
        database.unlink(missing_ok=True)
        self._database = sqlite3.connect(database)
        self._database.executescript(f"PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF; {_TABLES}")

    def read(self, log: Path, slots: Mapping[str, str]) -> None:
        """Take the whole log in. `slots`: the workers' names by their engines'."""
        requests = _requests(log, slots)
        insert = "INSERT INTO request VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        while chunk := list(islice(requests, _AT_ONCE)):
            self._database.executemany(insert, chunk)

    def add_answers(self, questions: Iterable[str], batch: str) -> None:
        """Say which batch asked some questions."""
        rows = ((question, batch) for question in questions)
        self._database.executemany("INSERT INTO answer VALUES (?, ?)", rows)

    def index(self) -> None:
        """Once all is in, before anything is asked."""
        self._database.executescript(_INDEXES)

    def close(self) -> None:
        self._database.close()

    @property
    def num_made(self) -> int:
        """Tokens, whatever became of them."""
        return int(self._one("SELECT TOTAL(end - num_given) FROM request"))

    @property
    def num_requests(self) -> int:
        return int(self._one("SELECT COUNT(*) FROM request"))

    def remade(self) -> Iterator[Remade]:
        """Everything that was made twice."""
        again = (
            "SELECT * FROM request WHERE question IN "
            "(SELECT question FROM request GROUP BY question HAVING COUNT(*) > 1) "
            "ORDER BY question, started_s"
        )
        for _question, group in groupby(self._all(again), key=lambda r: r.question):
            yield from remade(group)

    def of_engine(self, engine: str, from_s: float, until_s: float) -> list[Request]:
        """Its requests that began before `until_s` and whose last token came after `from_s`."""
        where = "WHERE engine = ? AND started_s <= ? AND moved_s >= ?"
        return list(self._all(f"SELECT * FROM request {where}", engine, until_s, from_s))

    def batches_of(self, question: str) -> list[str]:
        """Those that asked it: one, unless something was doubled; none that have no commit."""
        found = self._database.execute("SELECT batch FROM answer WHERE question = ?", (question,))
        return [batch for (batch,) in found]

    def first_token_s(self, batch: str, after_s: float) -> float | None:
        """Of the requests for a batch that began later; None: there was none."""
        ask = (
            "SELECT MIN(first_s) FROM answer JOIN request USING (question) "
            "WHERE batch = ? AND started_s > ?"
        )
        found = self._one(ask, batch, after_s)
        return None if found is None else float(found)

    def _all(self, ask: str, *values: Any) -> Iterator[Request]:
        return (Request(*row) for row in self._database.execute(ask, values))

    def _one(self, ask: str, *values: Any) -> Any:
        return self._database.execute(ask, values).fetchone()[0]


def remade(requests: Iterable[Request]) -> Iterator[Remade]:
    """What was made twice of one question; its requests in the order of time."""
    earlier: list[Request] = []
    for request in requests:
        made = {place for other in earlier for place in range(other.num_given, other.end)}
        num_tokens = sum(place in made for place in range(request.num_given, request.end))
        if num_tokens:
            yield Remade(request, list(earlier), num_tokens)
        earlier.append(request)


def _requests(log: Path, slots: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """As rows. In memory are those whose end wasn't read yet."""
    begun: dict[str, dict[str, Any]] = {}
    with log.open("rb") as lines:
        for line in lines:
            told = orjson.loads(line)
            if "rid" not in told:
                continue  # an engine's mode
            if "outcome" in told:
                begun.pop(told["rid"], None)
                yield _row(told, slots)
            else:
                begun[told["rid"]] = told
    for told in begun.values():
        at_s, given = told["started_s"], told["num_given"]
        ended = {"first_s": None, "moved_s": at_s, "end": given, "outcome": CUT_OFF}
        yield _row(told | ended, slots)


def _row(told: dict[str, Any], slots: Mapping[str, str]) -> tuple[Any, ...]:
    return (
        told["rid"],
        slots[told["engine"]],
        told["question"],
        told["num_given"],
        told["started_s"],
        told["first_s"],
        told["moved_s"] or told["started_s"],
        told["end"],
        told["outcome"],
    )
