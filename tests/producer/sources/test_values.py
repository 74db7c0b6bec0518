from __future__ import annotations

import datetime as dt
import decimal
import math
from typing import Any, cast

import orjson
import pyarrow as pa
import pytest

from dflash_workers.contract.records import Json, Refusal
from producer.sources.tables import table_rows

MOMENT = dt.datetime(2024, 2, 29, 12, 30, 1, 5)


def values_of(array: pa.Array[Any]) -> list[Any]:
    """The values as rows hold them; the reason where a row is refused."""
    rows = [cast("Json | Refusal", row) for _, row in table_rows(pa.table({"v": array}), "t", 1)]
    return [row["v"] if isinstance(row, dict) else row.reason for row in rows]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, -5, None]), [1, -5, None]),
        (pa.array([True, None]), [True, None]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([1.5, math.nan, math.inf, -math.inf, None]), [1.5, None, None, None, None]),
        (pa.array([MOMENT], pa.timestamp("us")), ["2024-02-29T12:30:01.000005"]),
        (pa.array([MOMENT], pa.timestamp("s", "UTC")), ["2024-02-29T12:30:01+00:00"]),
        (pa.array([10**9 + 1], pa.timestamp("ns")), ["1970-01-01T00:00:01"]),
        (pa.array([[10**9 + 1]]).cast(pa.list_(pa.timestamp("ns"))), [["1970-01-01T00:00:01"]]),
        (pa.array([dt.date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([dt.time(1, 2, 3)]), ["01:02:03"]),
        (pa.array([10**9 + 1], pa.time64("ns")), ["00:00:01"]),
        (pa.array([1500], pa.duration("ms")), [1.5]),
        (pa.array([decimal.Decimal("0.10"), decimal.Decimal("7.00")]), [0.1, 7.0]),
        (pa.array([decimal.Decimal("0.12345678901234567890")]), ["0.12345678901234567890"]),
        (pa.array(["a", "b", None]).dictionary_encode(), ["a", "b", None]),
        (pa.array([1.0, math.nan]).dictionary_encode(), [1.0, None]),
        (pa.array(["a"], pa.large_string()), ["a"]),
        (pa.array(["a"], pa.string_view()), ["a"]),
        (pa.array([None, None]), [None, None]),
        (pa.array([[1.0, math.nan, None], None]), [[1.0, None, None], None]),
        (pa.array([["a"]], pa.large_list(pa.string())), [["a"]]),
        (pa.array([{"a": 1, "b": None}, None]), [{"a": 1, "b": None}, None]),
        (pa.array([[{"at": MOMENT, "t": "x"}, {"at": None}]]), [
            [{"at": "2024-02-29T12:30:01.000005", "t": "x"}, {"at": None, "t": None}]
        ]),
        (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())), [
            {"a": 1, "b": None}
        ]),
        (pa.array([[(1, math.nan)]], pa.map_(pa.int64(), pa.float64())), [{"1": None}]),
        (pa.array([b"x", b"\xff", None]), ["x", "<1 bytes>", None]),
        (pa.array([{"a": [b"x"]}, {"a": []}]), [{"a": ["x"]}, {"a": []}]),
        (pa.array([10**18], pa.timestamp("s")), ["unsupported_value"]),
    ],
)  # fmt: skip
def test_a_value_becomes_what_json_has_for_it(array: pa.Array[Any], expected: list[Any]) -> None:
    found = values_of(array)

    assert found == expected
    assert orjson.loads(orjson.dumps(found)) == expected


def test_a_text_of_json_becomes_what_it_says() -> None:
    texts = ['{"a":[1]}', '"text"', None, '"\\ud83d"', "{"]
    array = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))

    assert values_of(array) == [{"a": [1]}, "text", None, "\ufffd", "unsupported_value"]


def test_texts_of_json_may_lie_deep_in_a_column() -> None:
    inner = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"role":"user"}', "2"]))

    assert values_of(pa.ListArray.from_arrays([0, 2], inner)) == [[{"role": "user"}, 2]]
