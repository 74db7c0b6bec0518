from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from producer.sources import Input, parse_line, read_rows

Compress = Callable[[bytes], bytes]

texts = st.text(alphabet='ab {"\\\n\r\u2028é\U0001f600', max_size=8)


def rows_of(body: bytes, path: Path) -> list[tuple[str, Json | Refusal]]:
    path.write_bytes(body)
    return list(read_rows([path]))


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x7fe"
    body = f'{{"t":"{text}"}}\n{{"t":"\\u000b"}}\n'.encode()

    rows = rows_of(body, tmp_path / "r.jsonl")

    assert [row for _, row in rows] == [{"t": text}, {"t": "\x0b"}]


def test_blank_lines_are_skipped_and_numbers_are_those_of_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    rows = rows_of(b'\n{"a":1}\n   \n\t\r\n{"a":2}\n\n', path)

    assert rows == [(f"{path}:2", {"a": 1}), (f"{path}:5", {"a": 2})]


def test_byte_order_mark_and_crlf_are_tolerated(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"

    rows = rows_of(mark + b'{"a":1}\r\n' + mark + b'{"a":2}\r\n', tmp_path / "r.jsonl")

    assert [row for _, row in rows] == [{"a": 1}, {"a": 2}]


def test_a_last_line_without_newline_is_a_row_and_one_cut_short_is_refused(tmp_path: Path) -> None:
    whole = rows_of(b'{"a":1}\n{"a":2}', tmp_path / "whole.jsonl")
    cut = rows_of(b'{"a":1}\n{"a":', tmp_path / "cut.jsonl")

    assert whole[1][1] == {"a": 2}
    refusal = cut[1][1]
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.excerpt) == ("malformed_json", '{"a":')
    assert refusal.source == f"{tmp_path / 'cut.jsonl'}:2"


@pytest.mark.parametrize("body", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, body: bytes) -> None:
    assert rows_of(body, tmp_path / "r.jsonl") == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"{'a': 1}", "malformed_json"),
        (b'{"a": NaN}', "malformed_json"),
        (b'{"a": "\xff"}', "malformed_json"),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", "malformed_json"),
    ],
)
def test_a_line_that_is_no_object_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    _, row = parse_line(line, "f:1")

    assert isinstance(row, Refusal)
    assert row.reason == reason


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\udcb2b", "a\ufffdb"),
        (r"\ud83d", "\ufffd"),
        (r"\ud83d x", "\ufffd x"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\\udcb2 \udcb2", "\\udcb2 \ufffd"),  # the first is a backslash and text
        (r"\\\udcb2", "\\\ufffd"),
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(escaped: str, text: str) -> None:
    _, row = parse_line(b'{"t":"%s"}' % escaped.encode(), "f:1")

    assert row == {"t": text}


def compress_zstd(body: bytes) -> bytes:
    # Two frames, as appending tools write them; the first without its size in the header.
    half = len(body) // 2
    first = zstandard.ZstdCompressor(write_content_size=False).compress(body[:half])
    return first + zstandard.ZstdCompressor().compress(body[half:])


def compress_gzip(body: bytes) -> bytes:
    half = len(body) // 2
    return gzip.compress(body[:half]) + gzip.compress(body[half:])


@pytest.mark.parametrize("compress", [compress_zstd, compress_gzip])
def test_compressed_files_are_read_whatever_their_name(tmp_path: Path, compress: Compress) -> None:
    body = b"".join(b'{"n":%d,"t":"%s"}\n' % (n, b"x" * (n % 999)) for n in range(5000))

    rows = rows_of(compress(body), tmp_path / "r.jsonl")

    assert [row["n"] for _, row in rows if isinstance(row, dict)] == list(range(5000))


@pytest.mark.parametrize("compress", [compress_zstd, compress_gzip])
def test_a_compressed_file_that_is_cut_short_is_an_error(
    tmp_path: Path, compress: Compress
) -> None:
    body = compress(b'{"a":1}\n' * 1000)

    with pytest.raises(BadInput, match="cut short"):
        rows_of(body[:-3], tmp_path / "r.jsonl.zst")


def test_a_damaged_compressed_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="damaged"):
        rows_of(b"\x1f\x8b\x08" + b"\xff" * 100, tmp_path / "r.jsonl.gz")


def test_a_missing_file_is_named_before_the_first_row(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_bytes(b'{"a":1}\n')

    with pytest.raises(BadInput, match="gone\\.jsonl: no such file"):
        next(read_rows([there, tmp_path / "gone.jsonl"]))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        next(read_rows([tmp_path]))


def test_an_endless_line_is_an_error_and_not_the_end_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.sources.MAX_LINE_BYTES", 1 << 20)

    with pytest.raises(BadInput, match="not JSON Lines"):
        rows_of(b" " * (1 << 22), tmp_path / "r.jsonl")


def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a":1}\n')))

    assert list(read_rows(["-"])) == [("stdin:1", {"a": 1})]


def test_mappings_go_through_the_same_door_as_lines() -> None:
    mappings: list[Input] = [{"t": "a\udcb2"}, {"t": {1, 2}}, {"t": float("nan")}]

    rows = list(read_rows(iter(mappings)))

    assert rows[0] == ("row:1", {"t": "a\ufffd"})
    assert [row.reason for _, row in rows[1:] if isinstance(row, Refusal)] == ["malformed_json"] * 2


@given(st.lists(st.dictionaries(texts, texts, max_size=3), max_size=5), st.integers(1, 50))
def test_rows_survive_any_cut_into_chunks(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], chunk_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.sources.CHUNK_BYTES", chunk_bytes)
        read = [row for _, row in read_rows([path])]

    assert read == rows
