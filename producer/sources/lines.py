"""JSON Lines -> items, the lines as they are: parsing them is left to whoever needs the row.

Reads the bytes of <- places.py; hands (source, line) to -> inputs.py. A line ends in "\\n" and in
nothing else: U+2028, U+0085 and vertical tabs are text. Blank lines are skipped but counted, so
that a source's number is the one an editor shows. Memory stays flat at any file size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import IO

import orjson

from dflash_workers.contract.errors import BadInput
from producer.sources.rows import BOM, MAX_ROW_BYTES, SourcedItem

# How a line ends whose object goes on in the next one.
_OPEN_ENDS = (b"{", b"[", b",", b":")


def read_lines(stream: IO[bytes], name: str) -> Iterator[SourcedItem]:
    """Every line that is not blank, without its line end. Raises BadInput where one has none."""
    for number, line in enumerate(bounded_lines(stream), start=1):
        if len(line) == MAX_ROW_BYTES:
            raise endless_line(name, number)
        line = line.strip()
        if line:
            yield f"{name}:{number}", line


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
