from __future__ import annotations

import pytest

from dflash_workers.contract.records import Refusal
from producer.sources.rows import EXCERPT_CHARS, parse_line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"{'a': 1}", "malformed_json"),
        (b"{a: 1}", "malformed_json"),
        (b'{"a": "\xff"}', "malformed_json"),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", "malformed_json"),
    ],
)
def test_a_line_that_is_no_object_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    row = parse_line(line, "f:1")

    assert isinstance(row, Refusal)
    assert (row.source, row.reason) == ("f:1", reason)


def test_a_refusal_shows_the_beginning_of_its_line() -> None:
    line = "é{".encode() * (1 << 20)

    row = parse_line(line, "f:1")

    assert isinstance(row, Refusal)
    assert row.excerpt == "é{" * (EXCERPT_CHARS // 2)


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
    row = parse_line(b'{"t":"%s"}' % escaped.encode(), "f:1")

    assert row == {"t": text}


def test_what_other_writers_let_through_is_read_control_characters_and_not_a_number() -> None:
    line = b'{"a": "one\x0btwo\x00", "b": NaN, "c": [Infinity]}'

    assert parse_line(line, "f:1") == {"a": "one\x0btwo\x00", "b": None, "c": [None]}
