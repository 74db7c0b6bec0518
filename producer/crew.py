"""Items -> outcomes as candidates.py makes them, in as many processes as there are cores.

Called by intake.py in place of read_candidates: the same outcomes in the same order. To read a row
takes three times as long as to plan it, so that one process would leave all cores idle but one. A
short input starts no process. A reader works on a chunk of items while the caller plans another
one's outcomes; it ends when its pipe does, and so with the caller, however that ends. Lines that
the plan knows are told apart here, because what it knows is too much to be in every process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from dflash_workers.contract.errors import NotEnough
from producer.candidates import Candidate, Known, Outcome, read_candidates
from producer.rules import LineHash, Rules
from producer.sources.inputs import SourcedItem

ALONE_ITEMS = 2_000  # before it is worth it to start processes
CHUNK_ITEMS = 500
MAX_READERS = 8  # as many as one planning process keeps up with

# A fork has rules and imports at once. If a thread of ours is busy with S3 by then, it holds no
# lock that reading takes.
_PROCESSES = (
    multiprocessing.get_context("fork")
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn")
)

_Item = SourcedItem | tuple[str, Known]
_Sent = Outcome | tuple[Any, ...]


def read_in_parallel(
    items: Iterable[SourcedItem],
    rules: Rules,
    known_lines: Container[int] = frozenset(),
    num_readers: int | None = None,
) -> Iterator[Outcome]:
    """What read_candidates gives. Readers as there are cores, unless a number is given.

    Raises NotEnough where a reader dies, which is what a system short of memory does to it.
    """
    remaining = iter(items)
    num_readers = num_readers or min(MAX_READERS, _num_cores())
    # A renamed duplicate depends on all rows before it.
    if num_readers == 1 or rules.duplicates == "suffix":
        yield from read_candidates(remaining, rules, known_lines)
        return
    yield from read_candidates(islice(remaining, ALONE_ITEMS), rules, known_lines)
    if (first := next(remaining, None)) is None:
        return
    marked = _marked(chain([first], remaining), rules, known_lines)
    with _started(num_readers, rules) as readers:
        yield from _in_order(readers, marked)


def _in_order(readers: list[_Reader], items: Iterator[_Item]) -> Iterator[Outcome]:
    free, busy = deque(readers), deque[_Reader]()
    done: Iterator[Outcome] = iter(())
    while True:
        # Before what is done is given away: the reader shall work while that is planned.
        while free and (chunk := list(islice(items, CHUNK_ITEMS))):
            free[0].take(chunk)
            busy.append(free.popleft())
        yield from done
        if not busy:
            return
        done = busy[0].outcomes()
        free.append(busy.popleft())


def _marked(
    items: Iterator[SourcedItem], rules: Rules, known_lines: Container[int]
) -> Iterator[_Item]:
    """The items, with a mark in place of each line that is known."""
    if not known_lines:
        yield from items
        return
    line_hash = LineHash(rules)
    for source, item in items:
        digest = line_hash.digest(item, source) if isinstance(item, bytes) else b""
        if digest and int.from_bytes(digest) in known_lines:
            yield source, Known(source)
        else:
            yield source, item


@dataclass(slots=True)
class _Reader:
    """A process and this end of its pipe. It has one chunk at most, or both ends would wait."""

    process: BaseProcess
    pipe: Connection
    known: list[Known] = field(default_factory=list)  # a chunk of these needs no reading

    def take(self, chunk: list[_Item]) -> None:
        """Begin to read a chunk."""
        self.known = [item for _, item in chunk if isinstance(item, Known)]
        if len(self.known) < len(chunk):
            self.known = []
            self._send(chunk)

    def outcomes(self) -> Iterator[Outcome]:
        """Of the chunk taken, once it is read."""
        return iter(self.known) if self.known else map(_received, self._receive())

    def _send(self, chunk: list[_Item]) -> None:
        try:
            self.pipe.send(chunk)
        except OSError as error:
            raise _killed() from error

    def _receive(self) -> list[_Sent]:
        try:
            return cast("list[_Sent]", self.pipe.recv())
        except (EOFError, OSError) as error:
            raise _killed() from error


@contextmanager
def _started(num_readers: int, rules: Rules) -> Iterator[list[_Reader]]:
    readers: list[_Reader] = []
    try:
        for _ in range(num_readers):
            here, there = _PROCESSES.Pipe()
            callers = [*(reader.pipe for reader in readers), here]
            arguments = (there, callers, rules)
            process = _PROCESSES.Process(target=_read_chunks, args=arguments, daemon=True)
            process.start()
            there.close()
            readers.append(_Reader(process, here))
        yield readers
    finally:
        for reader in readers:
            reader.process.terminate()
            reader.process.join()
            reader.pipe.close()


def _read_chunks(pipe: Connection, callers: list[Connection], rules: Rules) -> None:
    """What a reader does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's business
    for end in callers:
        end.close()  # a pipe ends when nobody has its other end any more
    while True:
        try:
            chunk: list[_Item] = pipe.recv()
            outcomes = read_candidates(chunk, rules)
            # A plain tuple is sent in a third of the time.
            pipe.send([tuple(o) if type(o) is Candidate else o for o in outcomes])
        except (EOFError, OSError):
            return


def _received(sent: _Sent) -> Outcome:
    return tuple.__new__(Candidate, sent) if type(sent) is tuple else cast("Outcome", sent)


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _killed() -> NotEnough:
    return NotEnough("a process that read rows was killed: is memory short?")
