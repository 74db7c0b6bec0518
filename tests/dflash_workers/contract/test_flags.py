"""Flags: what is wrong is found, and what only looks so is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.flags import (
    ANSWER_FLAGS,
    CONVERSATION_FLAGS,
    MAX_CALLS,
    MAX_PERIOD,
    MIN_LONG_REPEATS,
    MIN_REPEATS,
    SHORT_PERIOD,
    STUCK_IDS,
    check_policies,
    has_stray_marker,
    is_calling_on,
    is_garbled,
    is_repetitive,
    is_stuck,
)

ids = st.lists(st.integers(0, 3), max_size=60)


@settings(deadline=None)
@given(ids, st.lists(st.integers(0, 3), min_size=1, max_size=SHORT_PERIOD))
def test_a_phrase_said_often_enough_is_repetition(before: list[int], phrase: list[int]) -> None:
    assert is_repetitive(before + phrase * MIN_REPEATS)


@settings(deadline=None)
@given(ids, st.integers(SHORT_PERIOD + 1, MAX_PERIOD), st.randoms())
def test_a_long_phrase_need_not_be_said_so_often(
    before: list[int], period: int, chance: random.Random
) -> None:
    phrase = chance.sample(range(1000), period)

    assert is_repetitive(before + phrase * MIN_LONG_REPEATS)
    assert not is_repetitive([*before, -1, *phrase * (MIN_LONG_REPEATS - 1)])


@settings(deadline=None)
@given(ids, st.lists(st.integers(0, 1), max_size=200))
def test_repetition_is_what_a_slow_search_finds(before: list[int], tail: list[int]) -> None:
    output = before + tail
    found = False
    for period in range(1, MAX_PERIOD + 1):
        span = period * (6 if period <= 32 else 4)
        last = output[-span:]
        equal = all(last[i] == last[i - period] for i in range(period, len(last)))
        found = found or (len(last) == span and equal)

    assert is_repetitive(output) == found


@pytest.mark.parametrize(
    "output",
    [
        [],
        [7],
        [7] * (MIN_REPEATS - 1),
        [7, 8] * (MIN_REPEATS - 1),
        [7] * 50 + [8],  # went on to say something else
        list(range(SHORT_PERIOD + 1)) * (MIN_LONG_REPEATS - 1),
        list(range(MAX_PERIOD + 1)) * MIN_REPEATS,  # longer than any phrase looked for
        list(range(4000)),
    ],
)
def test_what_is_not_said_over_and_over_at_the_end_is_not_repetition(output: list[int]) -> None:
    assert not is_repetitive(output)


@pytest.mark.parametrize("period", [1, 7, STUCK_IDS // MIN_LONG_REPEATS])
def test_only_long_repetition_is_stopped_while_it_goes_on(period: int) -> None:
    loop = list(range(period)) * STUCK_IDS

    assert is_stuck([9, 9, *loop[:STUCK_IDS]])
    assert not is_stuck([-9, *loop[: STUCK_IDS - 1]])


def test_a_table_of_zeros_is_not_stopped() -> None:
    rows = [[0, 1] * 12 + [100 + row] for row in range(60)]

    assert not any(is_stuck([i for row in rows[:n] for i in row]) for n in range(len(rows) + 1))


def test_more_calls_than_anybody_makes_are_a_loop() -> None:
    one_call = [50, 1, 2, 3, 51]

    assert not is_calling_on(one_call * MAX_CALLS, 50)
    assert is_calling_on(one_call * (MAX_CALLS + 1), 50)
    assert not is_calling_on([7] * 100, -1)


@pytest.mark.parametrize(
    "text",
    [
        "done<|im_end|>",
        "<|im_start|>user\nI go on",
        "<｜User｜>",
        "so </think> it is",
        "<think>well",
        "<tool_call>{",
        "a call: <function=f>",
        "[INST] next",
        "[/TOOL_CALLS]",
        "<|python_tag|>",
    ],
)
def test_a_marker_in_content_is_stray(text: str) -> None:
    assert has_stray_marker(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a <b>bold</b> <thinking> word",
        "if a <| b |> c",
        "[INSTALL] and [think]",
        "f(x) <= y >= z",
        "<|not one|>",
    ],
)
def test_what_only_looks_like_a_marker_is_none(text: str) -> None:
    assert not has_stray_marker(text)


@pytest.mark.parametrize(
    "text", ["\ufffd" * 3 + "abc", "a\x00b", "a\x1b[1mb", "bell\x07", "a\ufffdb" * 50, "\x7f"]
)
def test_what_nobody_wrote_is_garbled(text: str) -> None:
    assert is_garbled(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain\ttext\r\n",
        "漢字 🙂 é",
        "cut in a character \ufffd",
        "x" * 400 + "\ufffd" + "y" * 400,
    ],
)
def test_what_somebody_may_have_written_is_not_garbled(text: str) -> None:
    assert not is_garbled(text)


def test_policies_name_flags_and_what_can_be_done_about_them() -> None:
    check_policies({})
    check_policies(dict.fromkeys(ANSWER_FLAGS, "retry-once"))
    check_policies(dict.fromkeys(CONVERSATION_FLAGS, "reject"))


@pytest.mark.parametrize(
    "policies",
    [
        {"repetitions": "reject"},
        {"repetition": "drop"},
        {"repetition": True},
        {"tool_rounds": "retry-once"},  # a conversation is not asked again
    ],
)
def test_a_policy_that_cant_be_kept_is_refused(policies: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="quality"):
        check_policies(policies)


def _best_us(detect: Callable[[], object]) -> float:
    def once() -> float:
        started = time.perf_counter()
        detect()
        return time.perf_counter() - started

    return min(once() for _ in range(200)) * 1e6


def test_no_detector_takes_long_enough_to_be_skipped() -> None:
    chance = random.Random(0)
    output = [min(int(chance.paretovariate(0.5)), 150_000) for _ in range(2300)]
    looping = [*output[:300], *list(range(500)) * 4]
    text = "".join(chance.choice("abcdé fghi漢 jklm,.\n") for _ in range(9500))

    took_us = [
        _best_us(lambda: is_repetitive(output)),
        _best_us(lambda: is_repetitive(looping)),
        _best_us(lambda: is_stuck(output)),
        _best_us(lambda: is_calling_on(output, 150_000)),
        _best_us(lambda: has_stray_marker(text)),
        _best_us(lambda: is_garbled(text)),
    ]

    assert max(took_us) < 150  # 50 on an idle machine: a detector that isn't linear takes 1,000
