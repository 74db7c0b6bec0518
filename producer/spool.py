"""Outcomes that don't fit in memory, on disk for the length of one call.

Used by shuffle.py and preflight.py for what comes out of <- candidates.py. Outcomes are kept in
buckets, and each bucket is read in the order in which it was written. The file has no name that
anybody could open, and is gone with the process that made it, however that ends.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import orjson
import zstandard

from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.lines import decompress
from dflash_workers.contract.records import Refusal
from producer.candidates import Candidate, Known, NotDrawn, Outcome

CHUNK_BYTES = 1 << 16  # of prompt lines that a bucket keeps in memory
SPOOL_LEVEL = 1  # of zstd: a third of the bytes for little time


@contextmanager
def opened_spool() -> Iterator[Spool]:
    """An empty spool."""
    with tempfile.TemporaryFile(prefix="dflash-spool-") as file:
        yield Spool(file)


class Spool:
    """A temporary file of outcomes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._chunks: dict[int, list[Outcome]] = defaultdict(list)  # not written yet, by bucket
        self._num_bytes: dict[int, int] = defaultdict(int)  # of these
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (offset, bytes)
        self._end = 0

    def add(self, outcome: Outcome, bucket: int = 0) -> None:
        """Put an outcome behind the others of its bucket. Raises NotEnough for a full disk."""
        self._chunks[bucket].append(outcome)
        self._num_bytes[bucket] += len(outcome.line) if isinstance(outcome, Candidate) else 100
        if self._num_bytes[bucket] >= CHUNK_BYTES:
            self._write(bucket)

    def read(self, bucket: int = 0) -> Iterator[Outcome]:
        """A bucket's outcomes. Nothing may be added afterwards."""
        for offset, num_bytes in self._places[bucket]:
            self._file.seek(offset)
            frame = self._file.read(num_bytes)
            yield from map(_outcome, orjson.loads(decompress(frame)))
        yield from self._chunks[bucket]

    def _write(self, bucket: int) -> None:
        chunk = orjson.dumps([_facts(outcome) for outcome in self._chunks.pop(bucket)])
        frame = zstandard.ZstdCompressor(level=SPOOL_LEVEL).compress(chunk)
        try:
            self._file.write(frame)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise NotEnough(
                f"{folder}: {error.strerror}: set TMPDIR to a folder with room for the prompts"
            ) from error
        self._places[bucket].append((self._end, len(frame)))
        self._end += len(frame)
        self._num_bytes[bucket] = 0


def _facts(outcome: Outcome) -> list[Any]:
    """An outcome as JSON: its kind's name and its fields."""
    if isinstance(outcome, Candidate):
        outcome = outcome._replace(line=outcome.line.decode())  # type: ignore[arg-type]
    fields = dataclasses.astuple(outcome) if isinstance(outcome, Refusal) else outcome
    return [type(outcome).__name__, *fields]


def _outcome(facts: list[Any]) -> Outcome:
    kind, *fields = facts
    if kind == Candidate.__name__:
        candidate = Candidate._make(fields)
        return candidate._replace(line=facts[1 + Candidate._fields.index("line")].encode())
    kinds: dict[str, type[Refusal] | type[Known] | type[NotDrawn]]
    kinds = {k.__name__: k for k in (Refusal, Known, NotDrawn)}
    return kinds[kind](*fields)
