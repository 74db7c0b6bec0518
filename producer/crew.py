"""Items -> outcomes as candidates.py makes them, in as many processes as there are cores.

Called by intake.py in place of read_candidates: the same outcomes in the same order. To read a row
takes three times as long as to plan it, so that one process would leave all cores idle but one. A
short input starts no process. Readers work on chunks of items while the caller plans another one's
outcomes, or reads, too, where it would wait. A reader ends when its pipe does, and so with the
caller, however that ends. Lines that the plan knows are told apart by the caller, because what it
knows is too much to be in every process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from dflash_workers.contract.errors import NotEnough
from producer.candidates import Candidate, Known, Outcome, read_candidates
from producer.rules import LineHash, Rules
from producer.sources.inputs import Item, SourcedItem

ALONE_ITEMS = 2_000  # before it is worth it to start processes
CHUNK_ITEMS = 125
MAX_READERS = 8  # as many as one planning process keeps up with
MAX_BEGUN = 16  # chunks in memory

# A fork has rules and imports at once. If a thread of ours is busy with S3 by then, it holds no
# lock that reading takes.
_PROCESSES = (
    multiprocessing.get_context("fork")
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn")
)

_Item = tuple[str, Item | Known]
_Sent = Outcome | tuple[Any, ...]


def read_in_parallel(
    items: Iterable[SourcedItem],
    rules: Rules,
    known_lines: Container[int] = frozenset(),
    num_readers: int | None = None,
) -> Iterator[Outcome]:
    """What read_candidates gives. A reader for every other core, unless a number is given.

    Raises NotEnough where a reader dies, which is what a system short of memory does to it.
    """
    remaining = iter(items)
    num_readers = num_readers if num_readers is not None else min(MAX_READERS, _num_cores() - 1)
    # A renamed duplicate depends on all rows before it.
    if num_readers == 0 or rules.duplicates == "suffix":
        yield from read_candidates(remaining, rules, known_lines)
        return
    yield from read_candidates(islice(remaining, ALONE_ITEMS), rules, known_lines)
    if (first := next(remaining, None)) is None:
        return
    chunks = _chunks(chain([first], remaining), rules, known_lines)
    with _started(num_readers, rules) as readers:
        yield from _in_order(readers, chunks, rules)


def _in_order(
    readers: list[_Reader], chunks: Iterator[list[_Item]], rules: Rules
) -> Iterator[Outcome]:
    free, begun = deque(readers), deque[_Reader | list[Outcome]]()
    done: Iterable[Outcome] = ()
    while True:
        # Before what is done is given away: readers shall work while that is planned.
        while free and len(begun) < MAX_BEGUN and (chunk := next(chunks, None)):
            if isinstance(known := chunk[0][1], Known) and len(chunk) == 1:
                begun.append([known])
            else:
                free[0].take(chunk)
                begun.append(free.popleft())
        yield from done
        # Rather than wait for the reader whose turn it is, read here.
        while begun and not _is_done(begun[0]) and len(begun) < MAX_BEGUN:
            if not (chunk := next(chunks, None)):
                break
            begun.append(list(read_candidates(chunk, rules)))
        if not begun:
            return
        if isinstance(first := begun.popleft(), _Reader):
            done = first.outcomes()
            free.append(first)
        else:
            done = first


def _is_done(begun: _Reader | list[Outcome]) -> bool:
    return isinstance(begun, list) or begun.pipe.poll()


def _chunks(
    items: Iterator[SourcedItem], rules: Rules, known_lines: Container[int]
) -> Iterator[list[_Item]]:
    """The items, with marks in place of lines that are known."""
    line_hash = LineHash(rules)
    while chunk := list(islice(items, CHUNK_ITEMS)):
        if known_lines:
            yield _marked(chunk, line_hash, known_lines)
        else:
            yield [*chunk]


def _marked(
    chunk: list[SourcedItem], line_hash: LineHash, known_lines: Container[int]
) -> list[_Item]:
    """The chunk with a mark for each known line, or one for all where there is nothing else."""
    known = [
        isinstance(item, bytes) and int.from_bytes(line_hash.digest(item, source)) in known_lines
        for source, item in chunk
    ]
    first, _ = chunk[0]
    if all(known):
        return [(first, Known(first, len(chunk)))]
    return [
        (source, Known(source) if is_known else item)
        for (source, item), is_known in zip(chunk, known, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A process and this end of its pipe. It has one chunk at most, or both ends would wait."""

    process: BaseProcess
    pipe: Connection

    def take(self, chunk: list[_Item]) -> None:
        """Begin to read a chunk."""
        try:
            self.pipe.send(chunk)
        except OSError as error:
            raise _killed() from error

    def outcomes(self) -> Iterator[Outcome]:
        """Of the chunk taken, once it is read."""
        try:
            sent = cast("list[_Sent]", self.pipe.recv())
        except (EOFError, OSError) as error:
            raise _killed() from error
        return map(_received, sent)


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
