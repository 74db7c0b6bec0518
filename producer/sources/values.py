"""Arrow's values as JSON's, decided by the column's type and not by looking at each value.

Used by <- tables.py. Times become ISO text, spans seconds, decimals numbers where nothing is lost
and text otherwise; not-a-number and the infinities become null, texts of JSON what they say.
Columns that are JSON already (the most) cost nothing. What has no form raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import types

from dflash_workers.contract.records import Json
from producer.sources.rows import check_exact, mend_surrogates

Convert = Callable[[Any], Any]


def converter(kind: pa.DataType) -> Convert | None:
    """How a value that is not null becomes JSON; None where Python's value is JSON already."""
    if types.is_floating(kind):
        return _finite
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return lambda moment: moment.isoformat()
    if types.is_duration(kind):
        return lambda span: span.total_seconds()
    if types.is_decimal(kind):
        return _decimal
    if types.is_struct(kind):
        return _struct_converter(kind)
    if types.is_map(kind):
        return _map_converter(kind)
    if _is_list(kind):
        return _list_converter(kind)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return converter(kind.value_type)
    if _is_json_text(kind):
        return _parsed
    if _is_binary(kind):
        return _text_or_size
    if _is_plain(kind):
        return None
    return _refuse(kind)


def in_microseconds(block: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """The block with times as Python keeps them: it has no nanoseconds."""
    schema = pa.schema([f.with_type(_python_time(f.type)) for f in block.schema])
    return block if schema.equals(block.schema) else block.cast(schema, safe=False)


def _is_plain(kind: pa.DataType) -> bool:
    return (
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
    )


def _is_binary(kind: pa.DataType) -> bool:
    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _text_or_size(value: bytes) -> str:
    """Some writers forget to say that a column is text; what is none may be mere ballast."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"<{len(value)} bytes>"


def _is_list(kind: pa.DataType) -> bool:
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _is_json_text(kind: pa.DataType) -> bool:
    """How `datasets` keeps values whose type changes from row to row."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _parsed(text: str) -> Any:
    value = orjson.loads(mend_surrogates(text.encode()))
    check_exact(value, text)
    return value


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _decimal(number: Decimal) -> float | str:
    as_float = float(number)
    return as_float if Decimal(repr(as_float)) == number else str(number)


def _list_converter(kind: Any) -> Convert | None:
    convert = converter(kind.value_type)
    if convert is None:
        return None
    return lambda values: [v if v is None else convert(v) for v in values]


def _struct_converter(kind: pa.StructType) -> Convert | None:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    converters = {f.name: c for f in fields if (c := converter(f.type)) is not None}
    if not converters:
        return None

    def convert(struct: Json) -> Json:
        changed = {k: c(struct[k]) for k, c in converters.items() if struct[k] is not None}
        return struct | changed

    return convert


def _map_converter(kind: Any) -> Convert:
    convert = converter(kind.item_type)
    if convert is None:
        return lambda pairs: {str(key): value for key, value in pairs}
    return lambda pairs: {str(k): v if v is None else convert(v) for k, v in pairs}


def _refuse(kind: pa.DataType) -> Convert:
    def refuse(value: Any) -> Any:
        raise ValueError(f"a value of type {kind} can't be written as JSON")

    return refuse


def _python_time(kind: pa.DataType) -> pa.DataType:
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([f.with_type(_python_time(f.type)) for f in fields])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_python_time(kind.value_type)))
    return kind
