"""Answers with their ids as arrays: as strict as the records are."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.lines import dump_lines, load_lines
from dflash_workers.contract.records import Row
from tests.trainer.tokens.committed import THREE_TURNS, make_answer, make_row
from trainer.tokens.answered import parse_answered


def test_the_answers_are_those_that_the_records_have() -> None:
    body = dump_lines([THREE_TURNS, make_row(), make_row(make_answer([7], []), name="empty")])

    found = [answer for line in body.splitlines() for answer in parse_answered(line)]

    expected = [(row, answer) for row in load_lines(Row, body) for answer in row.answers]
    for answered, (row, answer) in zip(found, expected, strict=True):
        assert (answered.key, answered.id, answered.heldout) == (row.key, row.id, row.heldout)
        assert (answered.turn, answered.flags) == (answer.turn, answer.flags)
        assert answered.finish_reason == answer.finish_reason
        assert answered.input_ids.tolist() == answer.input_ids
        assert answered.output_ids.tolist() == answer.output_ids
        assert answered.input_ids.dtype == answered.output_ids.dtype == np.int32


NO_IDS: list[Any] = [
    *([True, 2], [1.0], ["1"], [None], [[1]], "1", None, {}, 7),
    *([2**31], [-(2**31) - 1], [2**63]),
]


def broken(**changes: Any) -> bytes:
    row = orjson.loads(dump_lines([make_row(make_answer([5], [6, 2]))]))
    row["answers"][0] |= changes
    return orjson.dumps(row)


@pytest.mark.parametrize(
    "body",
    [
        *(broken(output_ids=ids) for ids in NO_IDS),
        *(broken(input_ids=ids) for ids in NO_IDS),
        broken(turn="0"),
        broken(turn=True),
        broken(flags=[1]),
        broken(finish_reason=None),
        b"{}",
        b"[]",
        b"no JSON",
        b'{"answers": 5}',
        b'{"answers": [5]}',
        b'{"answers": [{}]}',
    ],
)
def test_what_is_no_row_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_answered(body)
