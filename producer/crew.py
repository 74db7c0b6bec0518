"""Pieces -> outcomes as candidates.py makes them, in as many processes as there are cores.

Called by intake.py with what <- sources/ give: the same outcomes in the same order as in one
process. To read a row takes several times as long as to plan it, so the caller does nothing else
than plan. A short input starts no process. A reader ends when its pipe does, and so with the
caller, however that ends. Lines that the plan knows are told apart by the readers, which share one
list of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from dflash_workers.contract.errors import NotEnough
from producer.candidates import Candidate, Known, Outcome, RowReader
from producer.known import NO_LINES, KnownLines
from producer.rules import Rules
from producer.sources.inputs import Lines, Piece, SourcedItem

ALONE_ROWS = 2_000  # before it is worth it to start processes
CHUNK_ITEMS = 125  # of what comes row by row
MAX_READERS = 8  # as many as one planning process keeps up with
MAX_BEGUN = 32  # chunks in memory
UNCOLLECTED = 100_000  # objects made in a reader before it looks for garbage that holds itself

# A fork has rules, imports and known lines at once. If a thread of ours is busy with S3 by then, it
# holds no lock that reading takes.
_PROCESSES = (
    multiprocessing.get_context("fork")
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn")
)

_Chunk = Lines | list[SourcedItem]
_Sent = Outcome | tuple[Any, ...]


def read_in_parallel(
    pieces: Iterable[Piece],
    rules: Rules,
    known_lines: KnownLines = NO_LINES,
    num_readers: int | None = None,
) -> Iterator[Outcome]:
    """What read_candidates gives. A reader for every core, unless a number is given.

    Raises NotEnough where a reader dies, which is what a system short of memory does to it.
    """
    num_readers = num_readers if num_readers is not None else min(MAX_READERS, _num_cores())
    chunks, reader, num_alone = _chunks(pieces), RowReader(rules, known_lines), 0
    for chunk in chunks:
        # A renamed duplicate depends on all rows before it.
        if num_alone >= ALONE_ROWS and num_readers > 1 and rules.duplicates != "suffix":
            with _started(num_readers, reader) as readers:
                yield from _in_order(readers, chain([chunk], chunks))
            return
        num_alone += chunk.text.count(b"\n") if isinstance(chunk, Lines) else len(chunk)
        yield from reader.read(_items(chunk))


def _chunks(pieces: Iterable[Piece]) -> Iterator[_Chunk]:
    """Lines as they are, single rows together."""
    rows: list[SourcedItem] = []
    for piece in pieces:
        is_lines = isinstance(piece, Lines)
        if rows and (is_lines or len(rows) == CHUNK_ITEMS):
            yield rows
            rows = []
        if isinstance(piece, Lines):
            yield piece
        else:
            rows.append(piece)
    if rows:
        yield rows


def _items(chunk: _Chunk) -> Iterable[SourcedItem]:
    return chunk.items() if isinstance(chunk, Lines) else chunk


def _in_order(readers: list[_Reader], chunks: Iterator[_Chunk]) -> Iterator[Outcome]:
    free, begun = deque(readers), deque[_Begun]()
    busy: dict[Connection, _Begun] = {}
    while True:
        # Before what is done is given away: readers shall work while that is planned.
        while free and len(begun) < MAX_BEGUN and (chunk := next(chunks, None)):
            work = free[0].begin(chunk)
            busy[work.reader.pipe] = work
            begun.append(work)
            free.popleft()
        if not begun:
            return
        is_done = begun[0].sent is not None
        for pipe in wait(busy, 0 if is_done else None):
            work = busy.pop(cast("Connection", pipe))
            work.finish()
            free.append(work.reader)
        if begun[0].sent is not None:
            yield from map(_received, begun.popleft().sent or ())


@dataclass(frozen=True, slots=True)
class _Reader:
    """A process and this end of its pipe. It has one chunk at most, or both ends would wait."""

    process: BaseProcess
    pipe: Connection

    def begin(self, chunk: _Chunk) -> _Begun:
        """Hand a chunk over."""
        try:
            self.pipe.send(chunk)
        except OSError as error:
            raise _killed() from error
        return _Begun(self)


@dataclass(slots=True)
class _Begun:
    """A chunk that a reader has."""

    reader: _Reader
    sent: list[_Sent] | None = field(default=None)  # its outcomes, once it is read

    def finish(self) -> None:
        """Take the outcomes from the reader, which is free then."""
        try:
            self.sent = self.reader.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error


@contextmanager
def _started(num_readers: int, reader: RowReader) -> Iterator[list[_Reader]]:
    readers: list[_Reader] = []
    try:
        for _ in range(num_readers):
            here, there = _PROCESSES.Pipe()
            callers = [*(each.pipe for each in readers), here]
            arguments = (there, callers, reader)
            process = _PROCESSES.Process(target=_read_chunks, args=arguments, daemon=True)
            process.start()
            there.close()
            readers.append(_Reader(process, here))
        yield readers
    finally:
        for each in readers:
            each.process.terminate()
            each.process.join()
            each.pipe.close()


def _read_chunks(pipe: Connection, callers: list[Connection], reader: RowReader) -> None:
    """What a reader does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's business
    for end in callers:
        end.close()  # a pipe ends when nobody has its other end any more
    gc.freeze()  # what it shares with the caller stays shared
    gc.set_threshold(UNCOLLECTED)
    while True:
        try:
            chunk: _Chunk = pipe.recv()
            pipe.send(_to_send(reader.read(_items(chunk))))
        except (EOFError, OSError):
            return


def _to_send(outcomes: Iterable[Outcome]) -> list[_Sent]:
    """The outcomes, known lines together."""
    sent: list[_Sent] = []
    for outcome in outcomes:
        if isinstance(outcome, Candidate):
            sent.append(tuple(outcome))  # sent in a third of the time
        elif isinstance(outcome, Known) and sent and isinstance(known := sent[-1], Known):
            sent[-1] = Known(known.source, known.num_rows + outcome.num_rows)
        else:
            sent.append(outcome)
    return sent


def _received(sent: _Sent) -> Outcome:
    return tuple.__new__(Candidate, sent) if type(sent) is tuple else cast("Outcome", sent)


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _killed() -> NotEnough:
    return NotEnough("a process that read rows was killed: is memory short?")
