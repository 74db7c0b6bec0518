"""Pieces -> outcomes as candidates.py makes them, in as many processes as there are cores.

Called by intake.py with what <- sources/ give: the same outcomes in the same order as in one
process. To read a row takes several times as long as to plan it, so the caller does nothing else
than plan, and readers have their next chunks before they are done. None waits for another in a
circle: a reader takes in what comes in a thread of its own, so that the caller can always hand over
a chunk, whatever that reader still wants to give back. A short input starts no process. A reader
ends when its pipe does, and so with the caller, however that ends. Lines that the plan knows are
told apart by the readers, which share one list of them.
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from threading import Thread
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
# Chunks that a reader has: one to read, and those to go on with while the caller plans or waits for
# a core. Of large ones it has one, for the memory's sake.
AHEAD = 4
LARGE_BYTES = 1 << 20  # of lines
TAKE_IN_S = 0.0005  # until what came is taken in, though a reader computes
UNCOLLECTED = 100_000  # objects made before anybody looks for garbage that holds itself

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
    """The outcomes of every row, in order. A reader for every core, unless a number is given.

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
        yield from _read(reader, chunk)


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


def _read(reader: RowReader, chunk: _Chunk) -> Iterator[Outcome]:
    return reader.read_lines(chunk) if isinstance(chunk, Lines) else reader.read(chunk)


def _in_order(readers: list[_Reader], chunks: Iterator[_Chunk]) -> Iterator[Outcome]:
    begun = deque[_Begun]()
    chunk = next(chunks, None)
    with DefaultSelector() as pipes:
        for reader in readers:
            pipes.register(reader.pipe, EVENT_READ, reader)
        while True:
            # Before what is done is given away: readers shall work while that is planned.
            while chunk is not None and len(begun) < MAX_BEGUN:
                reader = min(readers, key=_num_at_work)
                if _num_at_work(reader) >= (1 if _is_large(chunk) else AHEAD):
                    break
                begun.append(reader.begin(chunk))
                chunk = next(chunks, None)
            if not begun:
                return
            is_done = begun[0].sent is not None
            for key, _ in pipes.select(0 if is_done else None):
                cast("_Reader", key.data).finish()
            if begun[0].sent is not None:
                yield from map(_received, begun.popleft().sent or ())


def _num_at_work(reader: _Reader) -> int:
    return len(reader.at_work)


def _is_large(chunk: _Chunk) -> bool:
    return isinstance(chunk, Lines) and len(chunk.text) > LARGE_BYTES


@dataclass(slots=True)
class _Begun:
    """A chunk that a reader has."""

    sent: list[_Sent] | None = None  # its outcomes, once it is read


@dataclass(frozen=True, slots=True)
class _Reader:
    """A process and this end of its pipe."""

    process: BaseProcess
    pipe: Connection
    at_work: deque[_Begun] = field(default_factory=deque)  # what it has, the next to be done first

    def begin(self, chunk: _Chunk) -> _Begun:
        """Hand a chunk over."""
        try:
            self.pipe.send(chunk)
        except OSError as error:
            raise _killed() from error
        self.at_work.append(_Begun())
        return self.at_work[-1]

    def finish(self) -> None:
        """Take the outcomes of its first chunk."""
        try:
            sent = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error
        self.at_work.popleft().sent = sent


@contextmanager
def _started(num_readers: int, reader: RowReader) -> Iterator[list[_Reader]]:
    readers: list[_Reader] = []
    collected = gc.get_threshold()
    gc.set_threshold(UNCOLLECTED)  # of a million tuples that hold nothing but texts
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
        gc.set_threshold(*collected)
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
    sys.setswitchinterval(TAKE_IN_S)
    chunks = SimpleQueue[_Chunk | None]()
    Thread(target=_take_in, args=(pipe, chunks), daemon=True).start()
    while (chunk := chunks.get()) is not None:
        try:
            pipe.send(_to_send(_read(reader, chunk)))
        except OSError:
            return


def _take_in(pipe: Connection, chunks: SimpleQueue[_Chunk | None]) -> None:
    """Every chunk as it comes; None when no more will come."""
    try:
        while True:
            chunks.put(pipe.recv())
    except (EOFError, OSError):
        chunks.put(None)


def _to_send(outcomes: Iterable[Outcome]) -> list[_Sent]:
    """The outcomes, known lines together."""
    sent: list[_Sent] = []
    for outcome in outcomes:
        if isinstance(outcome, Candidate):
            sent.append(tuple(outcome))  # sent in a third of the time
        elif isinstance(outcome, Known) and sent and isinstance(known := sent[-1], Known):
            sent[-1] = Known(known.num_rows + outcome.num_rows)
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
