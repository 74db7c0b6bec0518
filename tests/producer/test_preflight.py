from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from producer.candidates import Outcome
from producer.preflight import check_share, checked
from producer.rules import Draws, Rules
from tests.producer.row_by_row import read_candidates

BAD: Json = {"id": "bad"}


def outcomes(*rows: Json, samples: int = 1) -> list[Outcome]:
    items = [(f"f:{n}", row) for n, row in enumerate(rows, start=1)]
    return list(read_candidates(items, Rules(draws=Draws(samples))))


def row(row_id: str) -> Json:
    return {"id": row_id, "user_turns": ["a"]}


def test_nothing_comes_out_before_all_was_looked_at() -> None:
    read = []

    def once() -> Iterator[Outcome]:
        for outcome in outcomes(row("a"), row("b"), BAD):
            read.append(outcome.source)
            yield outcome

    passed = checked(once(), max_refused_share=0.5)
    first = next(passed)

    assert read == ["f:1", "f:2", "f:3"]
    assert [first, *passed] == outcomes(row("a"), row("b"), BAD)


def test_too_many_refused_rows_are_an_error_that_counts_them() -> None:
    with pytest.raises(BadInput, match=r"2 of 4 rows refused.*10\.00%: 2 no_messages"):
        next(checked(outcomes(row("a"), BAD, row("b"), BAD, samples=3), max_refused_share=0.1))


def test_as_many_refused_rows_as_allowed_are_none() -> None:
    half = outcomes(row("a"), BAD)

    assert list(checked(half, max_refused_share=0.5)) == half
    assert list(checked([], max_refused_share=0.0)) == []


def test_an_id_that_comes_twice_is_an_error_that_names_both_places() -> None:
    rows = outcomes(row("a"), row("b"), row("a"), samples=2)

    with pytest.raises(BadInput, match=r"f:3: id 'a' is that of f:1"):
        next(checked(rows, 1.0, refuse_duplicates=True))
    assert list(checked(rows, 1.0)) == rows


def test_more_than_fits_in_memory_comes_back_in_its_order() -> None:
    many = outcomes(*({"id": n, "user_turns": ["long " * 200]} for n in range(1000)))

    assert list(checked(many, 1.0)) == many


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(BadInput, match="max bad"):
        check_share(share)
