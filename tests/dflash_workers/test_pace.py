"""The last bound follows the pace that was seen, and is never the shorter for it."""

from __future__ import annotations

import pytest

from dflash_workers.pace import Pace, Patience

PATIENCE = Patience(request_s=10, token_s=0.25)


@pytest.mark.parametrize("num_seen", [0, 15])
def test_before_enough_answers_the_configured_pace_counts(num_seen: int) -> None:
    pace = Pace(PATIENCE)

    for _ in range(num_seen):
        pace.note(100, 1000.0)

    assert pace.limit_s(100) == 35


@pytest.mark.parametrize(
    ("token_s", "limit_s"), [(0.001, 35.0), (0.7, 10 + 8 * 0.7 * 100), (0.03125, 35.0)]
)
def test_the_slower_of_the_configured_and_the_seen_pace_counts(
    token_s: float, limit_s: float
) -> None:
    pace = Pace(PATIENCE)

    for num_tokens in range(1, 41):
        pace.note(num_tokens, num_tokens * token_s)
    pace.note(1, 3600.0)  # one that hung says nothing of the others
    pace.note(0, 5.0)

    assert pace.limit_s(100) == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("num_seen", "token_s", "word_ids"),
    [(15, 0.04, 64), (16, 0.04, 250), (16, 0.7, 64), (64, 0.004, 512)],
)
def test_a_word_is_what_comes_in_ten_seconds_and_neither_short_nor_long(
    num_seen: int, token_s: float, word_ids: int
) -> None:
    pace = Pace(PATIENCE)

    for _ in range(num_seen):
        pace.note(100, 100 * token_s)

    assert pace.word_ids() == pytest.approx(word_ids, abs=1)


def test_old_answers_are_forgotten() -> None:
    pace = Pace(PATIENCE)

    for _ in range(64):
        pace.note(1, 100.0)
    for _ in range(64):
        pace.note(1, 0.01)

    assert pace.limit_s(100) == 35
