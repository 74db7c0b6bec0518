"""JSON Lines -> pieces of many lines each: cutting them apart is left to whoever needs the rows.

Reads the bytes of <- streams.py; hands Lines to -> inputs.py. A line ends in "\\n" and in nothing
else: U+2028, U+0085 and vertical tabs are text. Blank lines are skipped but counted, so that a
source's number is the one an editor shows. Memory stays flat at any file size.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import IO

import numpy as np
import orjson

from dflash_workers.contract.errors import BadInput
from producer.sources.rows import BOM, MAX_ROW_BYTES, Lines

PIECE_BYTES = 1 << 17  # read at once: enough rows that handing them over costs each one little

_NEWLINE = ord("\n")

# How a line ends whose object goes on in the next one.
_OPEN_ENDS = (b"{", b"[", b",", b":")


def read_lines(stream: io.BufferedReader, name: str) -> Iterator[Lines]:
    """All lines. Raises BadInput for one that is too long to be a row."""
    number, begun = 1, [b""]  # a line's parts, as far as it is read
    num_begun = 0
    # Of a damaged file, `read1` gives all that comes before the damage.
    while text := stream.read1(PIECE_BYTES):
        whole, newline, rest = text.rpartition(b"\n")
        if newline:
            lines = Lines(name, number, b"".join([*begun, whole]))
            yield lines
            number += 1 + _num_newlines(lines.text)
            begun, num_begun = [], 0
        begun.append(rest)
        num_begun += len(rest)
        if num_begun >= MAX_ROW_BYTES:
            raise endless_line(name, number)
    yield Lines(name, number, b"".join(begun))


def _num_newlines(text: bytes) -> int:
    # Many bytes at a time, where `bytes.count` looks at each: that took a third of the reading.
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE))


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Every line with its end, cut at MAX_ROW_BYTES: a small compressed file can hold a line
    larger than the memory. One of that length is to be raised as `endless_line`.
    """
    return iter(partial(stream.readline, MAX_ROW_BYTES), b"")


def endless_line(name: str, number: int) -> BadInput:
    """The error of a line that is too long to be a row."""
    return BadInput(f"{name}:{number}: a line of over {MAX_ROW_BYTES >> 20} MiB: no row")


def refuse_spread_object(head: bytes, name: str) -> None:
    """Raise BadInput where the file begins with an object written over several lines."""
    first, newline, _ = head.removeprefix(BOM).lstrip().partition(b"\n")
    first = first.rstrip()
    if newline and first.startswith(b"{") and first.endswith(_OPEN_ENDS) and not _is_json(first):
        raise BadInput(
            f"{name}: one object over several lines: give JSON Lines (one object in each line) "
            "or an array of objects"
        )


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
