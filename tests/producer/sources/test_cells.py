from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Refusal
from tests.producer.sources.reading import read, rows


def written(text: str, path: Path) -> Path:
    path.write_bytes(text.encode())
    return path


def test_every_cell_is_text_and_an_empty_one_is_absent(tmp_path: Path) -> None:
    path = written("id,prompt,n\n007,yes,\n,1e5,NaN\n", tmp_path / "t.csv")

    found = read(path)

    assert found == [
        (f"{path}#1", {"id": "007", "prompt": "yes"}),
        (f"{path}#2", {"prompt": "1e5", "n": "NaN"}),
    ]


def test_what_a_spreadsheet_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    cells = [["id", "prompt"], ["1", 'a "b", c\nd\r\ne\u2028f'], ["2", "x" * 300_000]]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(cells)

    found = rows(path)

    assert found == [{"id": key, "prompt": prompt} for key, prompt in cells[1:]]


def test_tabs_part_the_cells_of_a_tsv_file_compressed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv.gz"
    path.write_bytes(gzip.compress(b"id\tprompt\n1\ta,b\n"))

    assert rows(path) == [{"id": "1", "prompt": "a,b"}]


def test_a_row_that_is_no_row_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    text = 'id,prompt\n1,a,b\n2\n3,"c"d\n4,e\n\n5,"cut\nshort\n'

    found = read(written(text, tmp_path / "t.csv"))

    refused = [(s, r.reason, r.detail) for s, r in found if isinstance(r, Refusal)]
    assert [row for _, row in found if isinstance(row, dict)] == [
        {"id": "2"},
        {"id": "4", "prompt": "e"},
    ]
    assert [(s.rpartition("#")[2], reason) for s, reason, _ in refused] == [
        ("1", "malformed_csv"),
        ("3", "malformed_csv"),
        ("6", "malformed_csv"),
    ]
    assert refused[0][2] == "line 2: 3 cells for 2 columns"
    assert refused[2][2].startswith("lines 7 to 8: ")


@pytest.mark.parametrize("text", ["", "id,prompt\n"])
def test_a_table_without_rows_has_none(tmp_path: Path, text: str) -> None:
    assert rows(written(text, tmp_path / "t.csv")) == []


def test_a_header_that_names_a_column_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="two columns are named 'a'"):
        rows(written("a,b,a\n1,2,3\n", tmp_path / "t.csv"))


def test_text_that_is_not_utf8_is_an_error_naming_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("id,prompt\n1,é\n".encode("latin-1"))

    with pytest.raises(BadInput, match=r"t\.csv:2: not UTF-8"):
        rows(path)
