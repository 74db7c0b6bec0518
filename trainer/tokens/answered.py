"""A data object -> its answers, with their ids as arrays.

Read by build.py for the ids road; commit.py reads the same object for whoever wants whole records.
Ids are nearly all of what there is, and to make records of the rest would take as long as they do:
so what a sample needs is taken out of the parsed JSON and checked, and nothing else is looked at.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.lines import decompress
from dflash_workers.contract.records import Commit, Json
from dflash_workers.contract.store import Store
from trainer.tokens.shards import Ids

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, and whose it is; the fields are those of Row and Answer."""

    key: str
    id: str
    heldout: bool
    turn: int
    input_ids: Ids
    output_ids: Ids
    finish_reason: str
    flags: list[str]


def read_answered(store: Store, commit: Commit) -> list[Answered]:
    """The answers that a commit names, checked against its sha256 and rows. Raises Corrupt."""
    body = store.get(commit.data_key)
    if hashlib.sha256(body).hexdigest() != commit.sha256:
        raise Corrupt(f"{commit.data_key}: sha256 differs from its commit's")
    lines = [line for line in decompress(body).split(b"\n") if line]
    if len(lines) != commit.num_rows:
        raise Corrupt(f"{commit.data_key}: {len(lines)} rows, its commit says {commit.num_rows}")
    return [answer for line in lines for answer in parse_answered(line)]


def parse_answered(line: bytes) -> list[Answered]:
    """The answers of a row. Raises Corrupt."""
    try:
        row = _expect(orjson.loads(line), dict, "a row")
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"a row is no JSON: {error}") from error
    key, name = _field(row, "key", str), _field(row, "id", str)
    heldout = _field(row, "heldout", bool)
    return [
        _answered(key, name, heldout, _expect(answer, dict, "an answer"))
        for answer in _field(row, "answers", list)
    ]


def _answered(key: str, name: str, heldout: bool, answer: Json) -> Answered:
    flags = _field(answer, "flags", list)
    for flag in flags:
        _expect(flag, str, "a flag")
    return Answered(
        key=key,
        id=name,
        heldout=heldout,
        turn=_field(answer, "turn", int),
        input_ids=_ids(answer, "input_ids", name),
        output_ids=_ids(answer, "output_ids", name),
        finish_reason=_field(answer, "finish_reason", str),
        flags=flags,
    )


def _ids(answer: Json, field: str, name: str) -> Ids:
    ids = _field(answer, field, list)
    if not set(map(type, ids)) <= {int}:
        raise Corrupt(f"prompt {name!r}: {field} holds what is no whole number")
    try:
        return np.array(ids, dtype=np.int32)
    except OverflowError as error:
        raise Corrupt(f"prompt {name!r}: {error}") from error


def _field(value: Json, name: str, kind: type[Kind]) -> Kind:
    if name not in value:
        raise Corrupt(f"missing field {name!r}")
    return _expect(value[name], kind, name)


def _expect(value: Any, kind: type[Kind], what: str) -> Kind:
    if type(value) is not kind:
        raise Corrupt(f"{what}: expected {kind.__name__}, found {type(value).__name__}")
    return value
