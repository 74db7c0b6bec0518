"""The answers given most often: no count is too high, none much too low, and few are kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.gate.repeats import Repeats


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 40), max_size=400), st.sampled_from([1, 7, 16, 100]))
def test_counts_miss_one_in_width_at_most(answers: list[int], width: int) -> None:
    repeats = Repeats(width)

    for answer in answers:
        repeats.add(str(answer).encode(), str(answer))

    exact = Counter(answers)
    found = {int(r.text): r.count for r in repeats.top(1000)}
    most_missed = len(answers) // width
    assert all(exact[a] - most_missed <= n <= exact[a] for a, n in found.items())
    assert {a for a, n in exact.items() if n > most_missed + 1} <= set(found)


def test_the_most_frequent_come_first_and_single_ones_not_at_all() -> None:
    repeats = Repeats()

    for answer in "abbcccd":
        repeats.add(answer.encode(), answer)

    assert [(r.text, r.count) for r in repeats.top(2)] == [("c", 3), ("b", 2)]
    assert len(repeats.top(10)) == 2


def test_memory_does_not_grow_with_different_answers() -> None:
    repeats = Repeats(width=100)

    for number in range(20_000):
        repeats.add(f"{number if number % 10 else 0}".encode(), "")

    assert len(repeats._kept) <= 200
    assert repeats.top(1)[0].count == 2000
