"""What the engines sampled, read from their own logs: the oracle of "made again".

Reads the files that engine_process.py writes. A token is a place in the answer to one question, and
answers are functions of their questions, so that a place sampled by two requests was made twice.
Nothing of the system under test is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass
class Request:
    """One request, as its engine saw it."""

    rid: str
    engine: str
    question: str
    message: str
    started_s: float  # wall clock
    num_given: int  # tokens of the answer that came with it
    end: int  # place in the answer that it got to
    outcome: str = "cut off"  # stop | length | abort: sent; left: its client was gone


@dataclass(frozen=True, slots=True)
class Remade:
    """A request that sampled places which others had sampled before it."""

    request: Request
    earlier: list[Request]  # of the same question, in the order of time
    num_tokens: int


def read_requests(logs: Iterable[Path]) -> list[Request]:
    """All requests, in the order in which they began."""
    requests: dict[str, Request] = {}
    for log in logs:
        for entry in _entries(log):
            _take_in(entry, log.stem, requests)
    return sorted(requests.values(), key=lambda request: request.started_s)


def remade(requests: Iterable[Request]) -> list[Remade]:
    """Everything that was made twice."""
    by_question: dict[str, list[Request]] = defaultdict(list)
    found = []
    for request in requests:
        earlier = by_question[request.question]
        made = {place for other in earlier for place in range(other.num_given, other.end)}
        num_tokens = sum(place in made for place in range(request.num_given, request.end))
        if num_tokens:
            found.append(Remade(request, list(earlier), num_tokens))
        earlier.append(request)
    return found


def _take_in(entry: dict[str, Any], engine: str, requests: dict[str, Request]) -> None:
    if asked := entry.get("asked"):
        rid, question, message, given = asked
        requests[rid] = Request(rid, engine, question, message, entry["t"], given, given)
    for rid, _, _, end in entry.get("made", []):
        requests[rid].end = end
    if sent := entry.get("sent"):
        requests[sent[0]].outcome = sent[1]
    if left := entry.get("left"):
        requests[left[0]].outcome = "left"


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_bytes().split(b"\n"):
        if line:
            yield orjson.loads(line)
