from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from tests.producer.sources.reading import read, rows

ROWS: list[Json] = [
    {"id": str(n), "messages": [{"role": "user", "content": f"x{n}"}] * (n % 3)}
    for n in range(1000)
]


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=300)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


every_kind = pytest.mark.parametrize(
    ("write", "name"),
    [(write_parquet, "t.parquet"), (write_file, "t.arrow"), (write_stream, "t.arrow")],
)


@every_kind
def test_rows_are_numbered_through_all_blocks(tmp_path: Path, write: Any, name: str) -> None:
    write(pa.Table.from_pylist(ROWS), tmp_path / name)

    found = read(tmp_path / name)

    assert [row for _, row in found] == ROWS
    assert [source for source, _ in found] == [f"{tmp_path / name}#{n}" for n in range(1, 1001)]


@every_kind
def test_an_empty_table_has_no_rows(tmp_path: Path, write: Any, name: str) -> None:
    write(pa.table({"id": pa.array([], pa.string())}), tmp_path / name)

    assert rows(tmp_path / name) == []


@every_kind
def test_a_column_without_values_in_the_first_block_keeps_its_type(
    tmp_path: Path, write: Any, name: str
) -> None:
    tools = [None] * 600 + [[{"name": "f"}]] * 400
    write(pa.table({"tools": pa.array(tools)}), tmp_path / name)

    assert [row["tools"] for row in rows(tmp_path / name) if isinstance(row, dict)] == tools


def test_streams_that_follow_one_another_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    write_stream(pa.Table.from_pylist(ROWS[:10]), path)
    path.write_bytes(path.read_bytes() * 2)

    assert rows(path) == ROWS[:10] * 2


@every_kind
@pytest.mark.parametrize("body", [b"", b'{"a":1}\n' * 20])
def test_a_file_that_is_not_what_its_name_says_is_an_error(
    tmp_path: Path, write: Any, name: str, body: bytes
) -> None:
    (tmp_path / name).write_bytes(body)

    with pytest.raises(BadInput, match=rf"^[^\n]*{name}: damaged or cut short: [^\n]*$"):
        rows(tmp_path / name)


@every_kind
def test_a_file_cut_short_is_an_error(tmp_path: Path, write: Any, name: str) -> None:
    path = tmp_path / name
    write(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-2000])

    with pytest.raises(BadInput, match="damaged or cut short"):
        rows(path)


def test_bytes_are_text_where_they_can_be_and_else_their_number(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(pa.table({"text": [b"caf\xc3\xa9", b"x"], "image": [None, b"\x89PNG"]}), path)

    found = [row for _, row in read(path)]

    assert found == [{"text": "café", "image": None}, {"text": "x", "image": "<4 bytes>"}]


def test_text_that_is_not_utf8_costs_its_own_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    write_stream(pa.table({"t": broken, "at": pa.array([1.0, 2.0, 3.0])}), path)

    found = rows(path)

    assert (found[0], found[2]) == ({"t": "a", "at": 1.0}, {"t": "c", "at": 3.0})
    assert isinstance(found[1], Refusal)
    assert found[1].reason == "unsupported_value"
