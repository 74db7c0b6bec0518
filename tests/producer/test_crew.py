from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import orjson
import psutil
import pytest

from dflash_workers.contract.errors import NotEnough
from producer.candidates import Candidate, Known, Outcome
from producer.crew import AHEAD, read_in_parallel
from producer.known import KnownLines, high_halves
from producer.limits import Limits
from producer.rules import Draws, Rules
from producer.sources.inputs import Lines, Piece, SourcedItem
from tests.producer.row_by_row import read_candidates

LINES = [
    *(orjson.dumps({"id": n % 900, "user_turns": [f"question {n}"]}) for n in range(1000)),
    *(b"{", b"[]", b'{"id": "bad"}'),
]


@pytest.fixture(autouse=True)
def soon_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.crew.ALONE_ROWS", 10)
    monkeypatch.setattr("producer.crew.CHUNK_ITEMS", 50)


def items() -> Iterator[SourcedItem]:
    for number, line in enumerate(LINES, start=1):
        yield f"f.jsonl:{number}", line
    for number in range(100):
        yield f"row:{number}", {"user_turns": [f"mapping {number}"]}


def pieces(lines_at_once: int = 30) -> Iterator[Piece]:
    """The same, as the sources hand them on."""
    for at in range(0, len(LINES), lines_at_once):
        yield Lines("f.jsonl", at + 1, b"\n".join(LINES[at : at + lines_at_once]))
    yield from list(items())[len(LINES) :]


def noted(pieces: Iterable[Piece], given: list[Piece]) -> Iterator[Piece]:
    """The pieces, each noted once it is taken."""
    for piece in pieces:
        given.append(piece)
        yield piece


def children() -> list[psutil.Process]:
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(draws=Draws(samples=2, weights={"f.jsonl": 0.7}, heldout_share=0.5)),
        Rules(duplicates="suffix"),
        Rules(limits=Limits(too_long=lambda turns, tools, overrides: None)),
    ],
)
def test_several_processes_give_the_outcomes_of_one_in_its_order(rules: Rules) -> None:
    alone = list(read_candidates(items(), rules))

    assert list(read_in_parallel(pieces(), rules, num_readers=3)) == alone
    assert list(read_in_parallel(items(), rules, num_readers=3)) == alone
    assert not children()


def test_known_lines_are_told_apart_wherever_they_stand() -> None:
    fresh = list(read_candidates(items(), Rules()))
    digests = [
        outcome.line_digest
        for number, outcome in enumerate(fresh)
        if isinstance(outcome, Candidate) and outcome.line_digest and number // 100 % 2
    ]
    known = KnownLines(high_halves(digests))

    outcomes = list(read_in_parallel(pieces(), Rules(), known, num_readers=2))

    alone = [o for o in read_candidates(items(), Rules(), known) if not isinstance(o, Known)]
    marks = [outcome for outcome in outcomes if isinstance(outcome, Known)]
    assert [outcome for outcome in outcomes if not isinstance(outcome, Known)] == alone
    assert sum(mark.num_rows for mark in marks) == len(digests) == 500
    assert len({mark.num_rows for mark in marks}) > 1  # whole chunks of them, and single ones


def test_readers_have_their_next_chunks_before_anything_is_planned() -> None:
    given: list[Piece] = []
    outcomes = read_in_parallel(noted(pieces(), given), Rules(), num_readers=2)
    for _ in range(31):  # the first piece is read here
        next(outcomes)

    assert len(given) >= 1 + 2 * AHEAD
    outcomes.close()  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
def test_chunks_larger_than_any_pipe_make_nobody_wait_for_the_other() -> None:
    lines = [orjson.dumps({"user_turns": [f"{n}" * 10_000]}) for n in range(100, 500)]
    chunks = [Lines("f.jsonl", at + 1, b"\n".join(lines[at : at + 20])) for at in range(0, 400, 20)]
    assert len(chunks[0].text) > 500_000

    outcomes = list(read_in_parallel(chunks, Rules(), num_readers=2))

    assert outcomes == list(read_candidates((i for c in chunks for i in c.items()), Rules()))


def test_of_large_chunks_a_reader_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.crew.LARGE_BYTES", 10)
    given: list[Piece] = []
    outcomes = read_in_parallel(noted(pieces(), given), Rules(), num_readers=2)
    for _ in range(31):
        next(outcomes)

    assert len(given) <= 5  # one read here, one for each reader, one next, one more if one is done
    assert len(list(outcomes)) == len(LINES) + 100 - 31


def test_a_short_input_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.crew.ALONE_ROWS", 2000)

    outcomes = read_in_parallel(pieces(), Rules(), num_readers=2)

    assert [next(outcomes) for _ in range(50)]
    assert not children()
    assert len(list(outcomes)) == len(LINES) + 100 - 50


def started() -> Iterator[Outcome]:
    """Outcomes, with processes at work on the rest."""
    outcomes = read_in_parallel(pieces(), Rules(), num_readers=2)
    for _ in range(100):
        next(outcomes)
    assert len(children()) == 2
    return outcomes


def test_whoever_stops_early_leaves_no_process_behind() -> None:
    outcomes = started()

    outcomes.close()  # type: ignore[attr-defined]

    _, alive = psutil.wait_procs(children(), timeout=10)
    assert not alive


def test_a_killed_process_ends_the_call_in_one_clear_line() -> None:
    outcomes = started()

    os.kill(children()[0].pid, signal.SIGKILL)

    with pytest.raises(NotEnough, match="memory"):
        list(outcomes)


PARENT = """
import itertools, sys
from producer.crew import read_in_parallel
from producer.rules import Rules

lines = ((f"f:{n}", b'{"user_turns": ["a"]}') for n in itertools.count())
outcomes = read_in_parallel(lines, Rules(), num_readers=2)
for _ in range(10_000):
    next(outcomes)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"started\n"
        orphans = psutil.Process(parent.pid).children()

        parent.kill()

    assert len(orphans) == 2
    _, alive = psutil.wait_procs(orphans, timeout=10)
    assert not alive
