"""Inputs -> items: the one door for everything that prompts come in.

An input is a Python mapping, "-" for stdin, a file, a folder, a pattern, an s3:// URL of any of the
three, or hf:ORG/NAME. Hands pieces to -> crew.py, or item by item to candidates.py: memory stays
flat at any size. Every row comes out once, as a row or as a Refusal, in the order of the inputs; an
input that can't be read ends the call, after the rows before the damage.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from dflash_workers.contract.settings import Settings
from producer.sources import files
from producer.sources.arrays import begins_array, read_array
from producer.sources.cells import DELIMITERS, read_cells
from producer.sources.hub import HUB_SCHEME, check_hub_name, read_hub
from producer.sources.lines import read_lines, refuse_spread_object
from producer.sources.places import S3_SCHEME, Place
from producer.sources.rows import (
    BOM,
    EXCERPT_CHARS,
    Item,
    Lines,
    Piece,
    SourcedItem,
    check_exact,
    is_shallow,
    parse_line,
    refusal,
)
from producer.sources.streams import STDIN_NAME, check_stdin, opened_stdin, opened_stream
from producer.sources.tables import TABLE_MAGICS, read_arrow, read_parquet

__all__ = [
    "EXCERPT_CHARS",
    "Input",
    "Item",
    "Lines",
    "Piece",
    "SourcedItem",
    "check_exact",
    "check_inputs",
    "is_shallow",
    "parse_line",
    "read_items",
    "read_pieces",
]

STDIN = "-"

Input = str | Path | Mapping[str, Any]


def read_items(inputs: Iterable[Input], settings: Settings) -> Iterator[SourcedItem]:
    """(source, item) of every row of every input. Raises what `read_pieces` does."""
    for piece in read_pieces(inputs, settings):
        if isinstance(piece, Lines):
            yield from piece.items()
        else:
            yield piece


def read_pieces(inputs: Iterable[Input], settings: Settings) -> Iterator[Piece]:
    """Every row of every input, one by one or many lines in one piece, in order.

    `settings` say how to reach s3:// inputs. Raises BadInput; for a missing file before the first
    row, unless `inputs` can be walked only once. Raises AccessDenied, Missing or StoreUnavailable
    for S3 and the hub.
    """
    if isinstance(inputs, Sequence):
        check_inputs(inputs)
    num_mappings = 0
    for given in inputs:
        if isinstance(given, Mapping):
            num_mappings += 1
            source = f"row:{num_mappings}"
            yield source, _row_of_mapping(given, source)
        else:
            yield from _read_named(str(given), settings)


def check_inputs(inputs: Iterable[Input]) -> None:
    """Raise BadInput for the first input that surely can't be read. Touches no network."""
    for given in inputs:
        name = "" if isinstance(given, Mapping) else str(given)
        if name == STDIN:
            check_stdin()
        elif name.startswith(HUB_SCHEME):
            check_hub_name(name)
        elif name and not name.startswith(S3_SCHEME):
            files.find_files(name, Settings())


def _read_named(name: str, settings: Settings) -> Iterator[Piece]:
    if name == STDIN:
        return _read_stdin()
    if name.startswith(HUB_SCHEME):
        return read_hub(name)
    return chain.from_iterable(map(_read_file, files.find_files(name, settings)))


def _read_stdin() -> Iterator[Piece]:
    with opened_stdin() as stream:
        yield from _read_stream(stream, STDIN_NAME)


def _read_file(place: Place) -> Iterator[Piece]:
    ending = files.ending_of(place.name)
    if ending in files.PARQUET:
        yield from read_parquet(place)
    elif ending in files.ARROW:
        yield from read_arrow(place)
    else:
        with opened_stream(place) as stream:
            yield from _read_stream(stream, place.name)


def _read_stream(stream: io.BufferedReader, name: str) -> Iterator[Piece]:
    """By the name's ending, and without a telling one by the first character that isn't blank."""
    ending, head = files.ending_of(name), stream.peek()
    if head.startswith(BOM):
        stream.read(len(BOM))
    if ending in DELIMITERS:
        return read_cells(stream, name, DELIMITERS[ending])
    if head.startswith(TABLE_MAGICS):
        raise BadInput(f"{name}: a table: give it the ending .parquet or .arrow, uncompressed")
    if ending not in files.LINES:
        if begins_array(head):
            return read_array(stream, name)
        refuse_spread_object(head, name)
    return read_lines(stream, name)


def _row_of_mapping(mapping: Mapping[str, Any], source: str) -> Json | Refusal:
    try:
        line = json.dumps(dict(mapping)).encode()  # escapes lone surrogates, which orjson refuses
    except (TypeError, ValueError, RecursionError) as error:
        excerpt = repr(mapping).encode(errors="replace")
        return refusal(source, "malformed_json", f"not JSON: {error}", excerpt)
    row = parse_line(line, source)
    try:
        check_exact(row, line)
    except ValueError as error:
        return refusal(source, "unsupported_value", str(error), line)
    return row
