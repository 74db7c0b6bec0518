from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import read_items
from tests.producer.sources.reading import read, rows

ROWS: list[Json] = [{"id": "a", "n": 1, "f": 1.5, "x": None}, {"id": "é\u2028", "m": [{"b": True}]}]

# Halves of surrogate pairs, backslashes and quotation marks: what a cut may fall between.
texts = st.text(alphabet='a"\\u\ud83d\ude00\udcb2é', max_size=8)


def written(body: bytes, path: Path) -> Path:
    path.write_bytes(body)
    return path


@pytest.mark.parametrize("name", ["r.json", "r.txt", "r"])
@pytest.mark.parametrize("indent", [None, 2])
def test_elements_are_rows_numbered_from_one(tmp_path: Path, name: str, indent: int | None) -> None:
    path = written(b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=indent).encode(), tmp_path / name)

    found = read(path)

    assert found == [(f"{path}#1", ROWS[0]), (f"{path}#2", ROWS[1])]


@pytest.mark.parametrize("name", ["r.jsonl", "r.ndjson", "r.jsonl.gz"])
def test_a_file_named_json_lines_is_read_as_such(tmp_path: Path, name: str) -> None:
    found = rows(written(b'[{"a":1}]\n{"a":2}\n', tmp_path / name))

    assert isinstance(found[0], Refusal)
    assert (found[0].reason, found[1]) == ("not_an_object", {"a": 2})


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    assert rows(written(b" [ ]\n", tmp_path / "r.json")) == []


def test_an_element_that_is_no_object_is_refused(tmp_path: Path) -> None:
    found = rows(written(b'[{"a":1}, "text", [1.5], {"a":2}]', tmp_path / "r.json"))

    refused = [(r.reason, r.excerpt) for r in found if isinstance(r, Refusal)]
    assert refused == [("not_an_object", '"text"'), ("not_an_object", "[1.5]")]
    assert (found[0], found[3]) == ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("end", [b', {"a":', b', {"a" 3}]', b"] ] ", b", ]"])
def test_a_damaged_array_gives_the_rows_before_and_names_the_element(
    tmp_path: Path, end: bytes
) -> None:
    path = written(b'[{"a":1}, {"a":2}' + end, tmp_path / "r.json")
    items = read_items([path], Settings())

    good = [next(items)[1], next(items)[1]]

    assert good == [{"a": 1}, {"a": 2}]
    with pytest.raises(BadInput, match=r"^[^\n]*r\.json: element 3: damaged JSON array[^\n]*$"):
        next(items)


def test_an_element_without_end_is_an_error_and_not_the_end_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.sources.arrays.MAX_ROW_BYTES", 1 << 20)
    path = written(b'[{"a":1}, "' + b"x" * (1 << 22), tmp_path / "r.json")

    with pytest.raises(BadInput, match="element 2: over 1 MiB"):
        rows(path)


@given(st.lists(st.dictionaries(texts, texts, max_size=3), max_size=4), st.integers(1, 40))
def test_an_array_means_what_its_elements_mean_as_lines(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[dict[str, str]], read_bytes: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = written("\n".join(map(json.dumps, given_rows)).encode(), folder / "any.jsonl")
    array = written(json.dumps(given_rows).encode(), folder / "any.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.sources.arrays.READ_BYTES", read_bytes)
        found = rows(array)

    assert found == rows(lines)
    assert len(found) == len(given_rows)


def test_escapes_that_are_no_halves_stay_as_they_are(tmp_path: Path) -> None:
    text = '\\ud83d \\\\ " \U0001f600'

    found = rows(written(orjson.dumps([{"t": text}]), tmp_path / "r.json"))

    assert found == [{"t": text}]
