"""Parquet and Arrow files -> rows, block by block.

Opens files through <- streams.py; hands (source, row) to -> inputs.py; `table_rows` serves hub.py
too. Types are those that the file states: nothing is inferred, so a column means the same in every
block. A row with a value that JSON has no form for (bytes) is refused and names its column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_workers.contract.records import Json, Refusal
from producer.sources.places import Place
from producer.sources.rows import SourcedItem, refusal
from producer.sources.streams import opened_for_jumps
from producer.sources.values import Convert, converter, in_microseconds

BLOCK_ROWS = 256  # rows held as Python objects at once

_ARROW_FILE_MAGIC = b"ARROW1"
TABLE_MAGICS = (b"PAR1", _ARROW_FILE_MAGIC)


def read_parquet(place: Place) -> Iterator[SourcedItem]:
    """Every row of a Parquet file."""
    with opened_for_jumps(place) as file:
        # Without pre-buffering, which would hold whole row groups.
        table = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        yield from _sourced(place.name, table.iter_batches(batch_size=BLOCK_ROWS))


def read_arrow(place: Place) -> Iterator[SourcedItem]:
    """Every row of an Arrow IPC file or stream."""
    with opened_for_jumps(place) as file:
        is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        file.seek(0)
        yield from _sourced(place.name, _file_blocks(file) if is_file else _stream_blocks(file))


def table_rows(block: pa.RecordBatch | pa.Table, name: str, first: int) -> Iterator[SourcedItem]:
    """The rows of one block, the first of which has the number `first` in its file."""
    block = in_microseconds(block)
    columns = [_column(block, i) for i in range(block.num_columns)]
    for at in range(block.num_rows):
        source = f"{name}#{first + at}"
        row: Json = {}
        for column, values, convert in columns:
            value = values[at]
            try:
                row[column] = value if convert is None or value is None else convert(value)
            except (ValueError, OverflowError) as error:
                yield source, _unsupported(source, column, value, error)
                break
        else:
            yield source, row


def _file_blocks(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    blocks = pa.ipc.open_file(file)
    return (blocks.get_batch(i) for i in range(blocks.num_record_batches))


def _stream_blocks(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    while True:  # streams may follow one another, as compressed frames do
        yield from pa.ipc.open_stream(file)
        if file.tell() >= file.size():
            return


def _sourced(name: str, blocks: Iterator[pa.RecordBatch]) -> Iterator[SourcedItem]:
    num_rows = 0
    for block in blocks:
        for start in range(0, block.num_rows, BLOCK_ROWS):
            part = block.slice(start, BLOCK_ROWS)
            yield from table_rows(part, name, num_rows + 1)
            num_rows += part.num_rows


def _column(block: pa.RecordBatch | pa.Table, i: int) -> tuple[str, list[Any], Convert | None]:
    name, column = block.schema.field(i).name, block.column(i)
    convert = converter(column.type)
    try:
        return name, column.to_pylist(), convert
    except (ValueError, OverflowError):  # some value has no Python form: find out which
        return name, [_python_value(scalar) for scalar in column], _raise_or(convert)


def _python_value(scalar: pa.Scalar[Any]) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _raise_or(convert: Convert | None) -> Convert:
    def raise_or_convert(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value if convert is None else convert(value)

    return raise_or_convert


def _unsupported(source: str, column: str, value: object, error: Exception) -> Refusal:
    detail = f"column {column!r}: {str(error) or type(error).__name__}"
    return refusal(source, "unsupported_value", detail, repr(value).encode(errors="replace"))
