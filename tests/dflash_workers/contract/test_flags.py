"""Flags: loops are found, and what only looks like one is not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.flags import MAX_PERIOD, MIN_REPEATS, is_repetitive

ids = st.lists(st.integers(0, 3), max_size=60)


@settings(deadline=None)
@given(ids, st.lists(st.integers(0, 3), min_size=1, max_size=MAX_PERIOD))
def test_a_phrase_said_often_enough_is_repetition(before: list[int], phrase: list[int]) -> None:
    assert is_repetitive(before + phrase * MIN_REPEATS)


@settings(deadline=None)
@given(ids)
def test_repetition_is_what_a_slow_search_finds(output: list[int]) -> None:
    found = False
    for period in range(1, MAX_PERIOD + 1):
        tail = output[-period * MIN_REPEATS :]
        equal = all(tail[i] == tail[i - period] for i in range(period, len(tail)))
        found = found or (len(tail) == period * MIN_REPEATS and equal)

    assert is_repetitive(output) == found


@pytest.mark.parametrize(
    "output",
    [
        [],
        [7],
        [7] * (MIN_REPEATS - 1),
        [7, 8] * (MIN_REPEATS - 1),
        [7] * 50 + [8],  # went on to say something else
        list(range(MAX_PERIOD + 1)) * MIN_REPEATS,  # longer than any phrase looked for
        list(range(4000)),
    ],
)
def test_what_is_not_said_over_and_over_at_the_end_is_not_repetition(output: list[int]) -> None:
    assert not is_repetitive(output)


def test_a_long_answer_is_judged_in_no_time() -> None:
    output = ([7] * 31 + [8]) * 1000  # 32,000 ids

    started = time.perf_counter()
    assert is_repetitive(output)

    assert time.perf_counter() - started < 1
