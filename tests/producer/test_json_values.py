from __future__ import annotations

from decimal import Decimal

import orjson
import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.json_values import checked_row, parse_text, sorted_text


def test_a_row_that_is_json_is_handed_back_itself() -> None:
    row = {"id": 1, "text": "a\U0001f600\u2028", "deep": [{"a": None}]}

    assert checked_row(row) is row


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("a\udcb2b", "a\ufffdb"),
        ("\ud83d", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ufffeé\ufeff\udcb2", "\ufffeé\ufeff\ufffd"),
    ],
)
def test_half_a_surrogate_pair_is_replaced_wherever_it_is(text: str, mended: str) -> None:
    row: Json = {"a": text, text: [{"b": [text, 1, None]}]}

    read = checked_row(row)

    assert read == {"a": mended, mended: [{"b": [mended, 1, None]}]}
    assert orjson.dumps(read)
    assert row["a"] == text


def deep(levels: int) -> Json:
    row: Json = {}
    for _ in range(levels):
        row = {"a": row}
    return row


@pytest.mark.parametrize(
    "row",
    [
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": Decimal(1)},
        {"a": 2**70},
        {1: "a"},
        {"a": "\udcb2", "b": b"bytes"},
        deep(300),
        deep(5000),
    ],
)
def test_a_row_that_json_can_not_hold_is_refused(row: Json) -> None:
    with pytest.raises(PromptRejected) as refused:
        checked_row(row)

    assert refused.value.reason == "malformed_json"


def test_json_text_is_read_with_halves_of_pairs_replaced() -> None:
    assert parse_text('{"a": [1, "\\u00e9"]}') == {"a": [1, "é"]}
    assert parse_text('{"a": "\\udcb2b"}') == {"a": "\ufffdb"}


@pytest.mark.parametrize(
    "text",
    ["", "a", "{'a': 1}", "[1", "NaN", '["\\ud83d", NaN]', "[" * 5000, "[" * 5000 + "]" * 5000],
)
def test_text_that_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|unexpected|Expecting|input|nested|recursion|data"):
        parse_text(text)


def test_what_is_read_from_text_can_be_written_again_or_is_an_error() -> None:
    for levels in (200, 253, 260, 900, 1100):
        text = "[" * levels + "]" * levels
        try:
            value = parse_text(text)
        except ValueError:
            assert levels > 250
        else:
            assert orjson.dumps(value).decode() == text


def test_equal_values_have_equal_texts() -> None:
    assert sorted_text({"b": 1, "a": [True]}) == sorted_text({"a": [True], "b": 1})


def test_an_integer_in_a_text_that_would_be_rounded_is_a_value_error() -> None:
    assert parse_text("[18446744073709551615, 1e19]") == [2**64 - 1, 1e19]
    with pytest.raises(ValueError, match="18446744073709551616"):
        parse_text('{"a": [18446744073709551616]}')
