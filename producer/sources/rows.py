"""What one row of input is, and what becomes of a row that is none.

Every reader of this package hands (source, item) on: a JSON line not parsed yet, the row that a
table or an array holds, or a Refusal. The source says where a person finds it: "path:line" for
JSON Lines, "path#row" for the rest (the first is 1). JSON Lines come as Lines, many rows in one
piece: to cut them apart is left to whoever needs the rows. `parse_line` is the one door from bytes
to a row, so that a row means the same whichever file it came from.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from dflash_workers.contract.records import Json, Refusal

Item = bytes | Json | Refusal
SourcedItem = tuple[str, Item]


class Lines(NamedTuple):
    """Whole lines of a file, one behind the other."""

    name: str  # the file's
    first: int  # number of the first line
    text: bytes

    def items(self) -> Iterator[SourcedItem]:
        """Every line that is not blank, without its line end."""
        for number, line in enumerate(self.texts(), start=self.first):
            if line:
                yield self.source(number), line

    def texts(self) -> list[bytes]:
        """Every line without its line end; a blank one is empty."""
        # Finds line ends many bytes at a time, as `bytes.split` does not.
        return [line.strip() for line in io.BytesIO(self.text)]

    def source(self, number: int) -> str:
        """Where a person finds a line."""
        return f"{self.name}:{number}"


Piece = SourcedItem | Lines

BOM = b"\xef\xbb\xbf"
EXCERPT_CHARS = 200
SHALLOW_DEPTH = 200  # orjson writes up to 254 levels, some of which a plan puts around a row
MAX_ROW_BYTES = 1 << 26  # a row beyond it surely is none: the file is something else

_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_LONGEST_INT = 20  # characters of either
_SURELY_EXACT = float(1 << 63)
_DEEP = frozenset({dict, list})

# Any JSON escape; group 1 is half of a surrogate pair that lacks its other half.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_line(line: bytes, source: str) -> Json | Refusal:
    """One line as a row, without byte order mark; halves of surrogate pairs become U+FFFD."""
    try:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            # Where files were joined, a byte order mark may stand before any line.
            row = orjson.loads(mend_surrogates(line.removeprefix(BOM)))
    except orjson.JSONDecodeError as error:
        try:
            row = _read_leniently(line)
        except (ValueError, RecursionError):
            return refusal(source, "malformed_json", str(error), line)
    if not isinstance(row, dict):
        return not_an_object(source, row, line)
    return row


def is_shallow(row: Json, line: bytes) -> bool:
    """Whether a row is surely not nested so deeply that it can be read, but not written again."""
    # To look through a line takes longer than to look at the few values of most rows.
    return _is_flat(row) or line.count(b"[") + line.count(b"{") < SHALLOW_DEPTH


def _is_flat(row: Json) -> bool:
    """Whether a row holds nothing deeper than lists of objects of single values."""
    for value in row.values():
        if value.__class__ is list:
            for item in value:
                if item.__class__ is list:
                    return False
                if item.__class__ is dict and not _DEEP.isdisjoint(map(type, item.values())):
                    return False
        elif value.__class__ is dict:
            return False
    return True


def check_exact(value: Any, text: bytes | str) -> None:
    """Raise ValueError for an integer of a JSON text that orjson read as a float, and so not
    exactly, as it does with all that has over 64 bits."""
    if _may_be_rounded(value):
        json.loads(text, strict=False, parse_int=_check_int)


def _check_int(digits: str) -> None:
    if len(digits) > _LONGEST_INT or not _LEAST_INT <= int(digits) <= _MOST_INT:
        raise ValueError(f"the integer {digits[:40]} has over 64 bits: write it as text")


def _may_be_rounded(value: Any) -> bool:
    values = [value]
    while values:
        inner = values.pop()
        kind = type(inner)
        if kind is dict:
            values += inner.values()
        elif kind is list:
            values += inner
        elif kind is float and not -_SURELY_EXACT < inner < _SURELY_EXACT:
            return True
    return False


def _read_leniently(line: bytes) -> object:
    """What Python's own writer makes of NaN (null here), and raw control characters in a text."""
    text = mend_surrogates(line.removeprefix(BOM)).decode()
    row = json.loads(text, strict=False, parse_constant=lambda _: None)
    orjson.dumps(row)  # raises for what no object of ours can hold, such as integers of 100 bits
    return row


def mend_surrogates(text: bytes) -> bytes:
    """JSON text with U+FFFD for each half of a surrogate pair that lacks its other half."""
    return _ESCAPE.sub(_mended, text) if _SURROGATE.search(text) else text


def not_an_object(source: str, value: object, excerpt: bytes) -> Refusal:
    """The refusal of a row that is a list, a text, a number or null."""
    detail = f"a row must be an object, this is a {type(value).__name__}"
    return refusal(source, "not_an_object", detail, excerpt)


def refusal(source: str, reason: str, detail: str, excerpt: bytes) -> Refusal:
    """A row that can't be used, with its beginning for people."""
    # Four bytes are a character's most: a row of many MB is not decoded for 200 of its characters.
    text = excerpt[: 4 * EXCERPT_CHARS].decode(errors="replace")[:EXCERPT_CHARS]
    return Refusal(source, reason, detail, text)


def _mended(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match[1] else match[0]
