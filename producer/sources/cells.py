"""CSV and TSV -> rows of text, read as a stream.

Reads the bytes of <- streams.py; hands (source, row) to -> inputs.py. The first row names the
columns. Every cell is text, never guessed to be a number or a date; an empty one is absent. A row
with a line end inside quotation marks is one row, so sources count rows and not lines.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO

from dflash_workers.contract.errors import BadInput
from producer.sources.lines import bounded_lines, endless_line
from producer.sources.rows import MAX_ROW_BYTES, SourcedItem, refusal

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_cells(stream: IO[bytes], name: str, delimiter: str) -> Iterator[SourcedItem]:
    """Every row below the header. Raises BadInput for text or a header that can't be read."""
    csv.field_size_limit(MAX_ROW_BYTES)  # the library's own limit is 128 KiB
    table = csv.reader(_text_lines(stream, name), delimiter=delimiter, strict=True)
    columns = _read_header(table, name)
    number = 0
    while True:
        number += 1
        source = f"{name}#{number}"
        begin = table.line_num + 1
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:  # the next call goes on behind it
            detail = f"lines {begin} to {table.line_num}: {error}"
            yield source, refusal(source, "malformed_csv", detail, b"")
            continue
        if len(cells) > len(columns):
            detail = f"line {table.line_num}: {len(cells)} cells for {len(columns)} columns"
            excerpt = delimiter.join(cells).encode(errors="replace")
            yield source, refusal(source, "malformed_csv", detail, excerpt)
        elif row := {c: cell for c, cell in zip(columns, cells, strict=False) if cell}:
            yield source, row


def _read_header(table: Iterator[list[str]], name: str) -> list[str]:
    try:
        columns = next(table, [])
    except csv.Error as error:
        raise BadInput(f"{name}: the header can't be read: {error}") from error
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise BadInput(f"{name}: two columns are named {twice[0]!r}")
    return columns


def _text_lines(stream: IO[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(stream), start=1):
        if len(line) == MAX_ROW_BYTES:
            raise endless_line(name, number)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{name}:{number}: not UTF-8: save the table as UTF-8") from error
