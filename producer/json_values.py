"""What counts as JSON: a row as a whole, and values that were stored as JSON text.

Used by schemas.py for each row and by messages.py, tools.py and overrides.py for fields that CSV
and Parquet keep as text. The invariant: what has passed here can be written as JSON again, so that
no later step meets a lone surrogate, a type that JSON doesn't have, or endless nesting.
"""

from __future__ import annotations

import json
from reprlib import repr as short
from typing import Any, NoReturn

import orjson

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.sources.rows import check_exact


def checked_row(row: Json) -> Json:
    """The row itself, or a copy with U+FFFD for each lone surrogate.

    Raises PromptRejected where it holds what JSON can't.
    """
    try:
        orjson.dumps(row)  # the fastest walk over all of a value that there is
    except TypeError:
        try:
            mended: Json = _mended(row)
        except ValueError as error:
            raise PromptRejected("malformed_json", str(error)) from error
        return mended
    return row


def parse_text(text: str) -> Any:
    """The value that JSON text stands for. Raises ValueError."""
    try:
        value = orjson.loads(text)
        check_exact(value, text)
    except orjson.JSONDecodeError:
        # The one thing that the standard library reads and orjson doesn't: half an escaped pair.
        value = _parse_slowly(text)
    try:
        orjson.dumps(value)
    except TypeError:
        return _mended(value)
    return value


def parse_if_text(value: Any, reason: str) -> Any:
    """A value that may have been stored as JSON text; None for blank text.

    Raises PromptRejected with this reason where the text is no JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_text(value)
    except ValueError as error:
        raise PromptRejected(reason, f"not JSON: {short(value)}") from error


def sorted_text(value: Any) -> str:
    """The same text for the same value, whatever the order of its keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _mended(value: Any) -> Any:
    """A copy without lone surrogates. Raises ValueError where these were not all that's wrong."""
    try:
        mended = _without_surrogates(value)
        orjson.dumps(mended)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    return mended


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        # By way of UTF-16, where two halves that stand side by side are one sign.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def _parse_slowly(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(f"not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")
