from __future__ import annotations

import bz2
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import Input, check_inputs, read_items
from tests.producer.sources.reading import read, rows

Write = Callable[[list[Json], Path], None]

TEXT_ROWS: list[Json] = [
    {"id": f"{n:03}", "prompt": f'{"é" * n}\u2028 "q", \\ \n\r\n\x7f\U0001f600{n}'}
    for n in range(20)
]
DEEP_ROWS: list[Json] = [
    {
        "id": n,
        "share": n / 8,
        "messages": [{"role": "user", "content": f"x\u0085{n}"}, {"role": "assistant"}],
        "tools": [{"type": "function", "function": {"name": "f"}}] if n % 2 else None,
        "ok": n % 3 == 0,
    }
    for n in range(20)
]


def lines_of(rows: list[Json]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def write_cells(rows: list[Json], path: Path, delimiter: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_stream(rows: list[Json], path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_file(rows: list[Json], path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def save_data_set(rows: list[Json], path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)


CELL_KINDS: list[tuple[str, Write]] = [
    ("r.csv", lambda rows, path: write_cells(rows, path, ",")),
    ("r.tsv", lambda rows, path: write_cells(rows, path, "\t")),
]
KINDS: list[tuple[str, Write]] = [
    ("r.jsonl", lambda rows, path: _write(path, lines_of(rows))),
    ("r.jsonl.gz", lambda rows, path: _write(path, gzip.compress(lines_of(rows)))),
    ("r.jsonl.zst", lambda rows, path: _write(path, zstandard.compress(lines_of(rows)))),
    ("r.jsonl.bz2", lambda rows, path: _write(path, bz2.compress(lines_of(rows)))),
    ("r.json", lambda rows, path: _write(path, orjson.dumps(rows, option=orjson.OPT_INDENT_2))),
    ("r.json.gz", lambda rows, path: _write(path, gzip.compress(json.dumps(rows).encode()))),
    ("r.parquet", lambda rows, path: pq.write_table(pa.Table.from_pylist(rows), path)),
    ("stream.arrow", write_stream),
    ("file.arrow", write_file),
    ("saved", save_data_set),
]


def _write(path: Path, body: bytes) -> None:
    path.write_bytes(body)


def without_absent(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_absent(v) for k, v in value.items() if v is not None}
    return [without_absent(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("name", "write"), KINDS + CELL_KINDS)
def test_rows_of_text_are_the_same_whatever_file_they_came_from(
    tmp_path: Path, name: str, write: Write
) -> None:
    write(TEXT_ROWS, tmp_path / name)

    assert rows(tmp_path / name) == TEXT_ROWS


@pytest.mark.parametrize(("name", "write"), KINDS)
def test_deep_rows_are_the_same_whatever_file_they_came_from(
    tmp_path: Path, name: str, write: Write
) -> None:
    write(DEEP_ROWS, tmp_path / name)

    found = rows(tmp_path / name)

    assert without_absent(found) == without_absent(DEEP_ROWS)


@pytest.mark.parametrize(
    ("name", "write"), [kind for kind in KINDS if kind[0] in ("r.jsonl", "r.json", "r.parquet")]
)
def test_deep_rows_are_the_same_when_the_hubs_library_reads_them(
    tmp_path: Path, name: str, write: Write
) -> None:
    write(DEEP_ROWS, tmp_path / name)

    found = rows(f"hf:{tmp_path}")

    assert without_absent(found) == without_absent(DEEP_ROWS)


def test_a_value_may_change_its_type_from_line_to_line(tmp_path: Path) -> None:
    given: list[Json] = [{"tools": None, "args": 1}] * 5000 + [{"tools": [{}], "args": "x"}] * 5000
    (tmp_path / "r.jsonl").write_bytes(lines_of(given))
    (tmp_path / "r.json").write_bytes(orjson.dumps(given))

    assert rows(tmp_path / "r.jsonl") == rows(tmp_path / "r.json") == given


def test_inputs_of_all_kinds_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"a":1}\n')
    (tmp_path / "r.csv").write_bytes(b"a\n2\n")

    found = read({"a": 0}, tmp_path / "r.jsonl", f"{tmp_path}/r.csv", {"a": 3})

    assert found == [
        ("row:1", {"a": 0}),
        (f"{tmp_path}/r.jsonl:1", {"a": 1}),
        (f"{tmp_path}/r.csv#1", {"a": "2"}),
        ("row:2", {"a": 3}),
    ]


def test_a_file_named_twice_is_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a":1}\n')

    assert read(path, path) == [(f"{path}:1", {"a": 1})] * 2


def test_mappings_go_through_the_same_door_as_lines() -> None:
    mappings: list[Input] = [{"t": "a\udcb2"}, {"t": {1, 2}}, {"t": float("nan")}]

    found = list(read_items(iter(mappings), Settings()))

    assert found[0] == ("row:1", {"t": "a\ufffd"})
    assert isinstance(found[1][1], Refusal)
    assert found[1][1].reason == "malformed_json"
    assert found[2] == ("row:3", {"t": None})


def test_a_missing_file_is_named_before_the_first_row(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_bytes(b'{"a":1}\n')

    with pytest.raises(BadInput, match=r"gone\.jsonl: no such file"):
        next(read_items([there, tmp_path / "gone.jsonl"], Settings()))


def test_a_check_names_the_first_input_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").touch()

    check_inputs([{"a": 1}, tmp_path / "r.jsonl", str(tmp_path), "s3://bucket/key", "-"])
    with pytest.raises(BadInput, match="gone: no such file"):
        check_inputs([tmp_path / "r.jsonl", tmp_path / "gone"])


@pytest.mark.parametrize("magic", [b"PAR1", b"ARROW1"])
def test_a_table_whose_name_hides_it_is_not_taken_for_lines(tmp_path: Path, magic: bytes) -> None:
    (tmp_path / "prompts").write_bytes(magic + b"\0\n" * 100)

    with pytest.raises(BadInput, match=r"give it the ending \.parquet or \.arrow"):
        rows(tmp_path / "prompts")


def test_a_file_of_an_unknown_kind_is_tried_as_json_lines(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b'{"a":1}\nhello\n')

    found = rows(tmp_path / "prompts.txt")

    assert found[0] == {"a": 1}
    assert isinstance(found[1], Refusal)
