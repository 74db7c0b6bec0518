from __future__ import annotations

import tracemalloc
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Refusal
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import read_items
from tests.producer.sources.reading import read, rows

texts = st.text(alphabet='ab {"\\\n\r\u2028é\U0001f600', max_size=8)


def written(body: bytes, path: Path) -> Path:
    path.write_bytes(body)
    return path


def test_a_line_comes_out_as_it_is(tmp_path: Path) -> None:
    path = written(b'  {"a" :1, }\r\n', tmp_path / "r.jsonl")

    items = list(read_items([path], Settings()))

    assert items == [(f"{path}:1", b'{"a" :1, }')]


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x7fe"
    body = f'{{"t":"{text}"}}\n{{"t":"\\u000b"}}\n'.encode()

    found = rows(written(body, tmp_path / "r.jsonl"))

    assert found == [{"t": text}, {"t": "\x0b"}]


def test_blank_lines_are_skipped_and_numbers_are_those_of_an_editor(tmp_path: Path) -> None:
    path = written(b'\n{"a":1}\n   \n\t\r\n{"a":2}\n\n', tmp_path / "r.jsonl")

    found = read(path)

    assert found == [(f"{path}:2", {"a": 1}), (f"{path}:5", {"a": 2})]


def test_byte_order_mark_and_crlf_are_tolerated(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"

    found = rows(written(mark + b'{"a":1}\r\n' + mark + b'{"a":2}\r\n', tmp_path / "r.jsonl"))

    assert found == [{"a": 1}, {"a": 2}]


def test_a_last_line_without_newline_is_a_row_and_one_cut_short_is_refused(tmp_path: Path) -> None:
    whole = written(b'{"a":1}\n{"a":2}', tmp_path / "whole.jsonl")
    cut = written(b'{"a":1}\n{"a":', tmp_path / "cut.jsonl")

    found_whole, found_cut = rows(whole), rows(cut)

    assert found_whole[1] == {"a": 2}
    refused = found_cut[1]
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.excerpt) == ("malformed_json", '{"a":')
    assert refused.source == f"{cut}:2"


@pytest.mark.parametrize("body", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, body: bytes) -> None:
    assert rows(written(body, tmp_path / "r.jsonl")) == []


@pytest.mark.parametrize("name", ["r.json", "r.txt", "r"])
def test_an_object_over_several_lines_is_an_error_that_says_what_to_give(
    tmp_path: Path, name: str
) -> None:
    body = orjson.dumps({"data": [{"a": 1}]}, option=orjson.OPT_INDENT_2)

    with pytest.raises(BadInput, match=r"give JSON Lines .* or an array"):
        rows(written(body, tmp_path / name))


def test_a_damaged_first_line_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    found = rows(written(b'{"a": 1, "b\n{"a":2}\n', tmp_path / "r.json"))

    assert isinstance(found[0], Refusal)
    assert found[1] == {"a": 2}


def test_an_endless_line_is_an_error_and_not_the_end_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.sources.lines.MAX_ROW_BYTES", 1 << 20)
    body = b'{"a":1}\n' + b" " * (1 << 22)

    with pytest.raises(BadInput, match=r"r\.jsonl:2: a line of over 1 MiB"):
        rows(written(body, tmp_path / "r.jsonl"))


def test_memory_stays_flat_however_long_the_file_is(tmp_path: Path) -> None:
    num_rows, row = 100_000, b'{"t":"%s"}\n' % (b"x" * 1990)
    with (tmp_path / "r.jsonl").open("wb") as file:
        for _ in range(num_rows // 1000):
            file.write(row * 1000)

    tracemalloc.start()
    num_read = sum(1 for _ in read_items([tmp_path / "r.jsonl"], Settings()))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_read == num_rows
    assert peak_bytes < 2 << 20


@given(st.lists(st.dictionaries(texts, texts, max_size=3), max_size=5), st.integers(1, 50))
def test_rows_survive_any_cut_into_buffers(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[dict[str, str]], buffer_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in given_rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.sources.streams.BUFFER_BYTES", buffer_bytes)
        found = rows(path)

    assert found == given_rows
