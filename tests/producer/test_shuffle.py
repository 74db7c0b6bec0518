from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from dflash_workers.contract.records import Json, Refusal
from producer.candidates import (
    Candidate,
    Known,
    NotDrawn,
    Outcome,
)
from producer.rules import Draws, Rules
from producer.shuffle import shuffled
from tests.producer.row_by_row import read_candidates


def candidates(num_rows: int, samples: int = 1) -> list[Outcome]:
    rows: list[Json] = [{"id": f"p{n}", "user_turns": ["a"]} for n in range(num_rows)]
    items = [(f"f:{n}", row) for n, row in enumerate(rows, start=1)]
    return list(read_candidates(items, Rules(draws=Draws(samples))))


def test_the_order_is_that_of_the_seed_and_of_nothing_else() -> None:
    in_order = candidates(500)
    mixed = random.Random(0).sample(in_order, len(in_order))

    once = list(shuffled(in_order, seed=1))

    assert once == list(shuffled(mixed, seed=1))
    assert sorted(once, key=str) == sorted(in_order, key=str)
    assert once != list(shuffled(in_order, seed=2))
    sources = [int(outcome.source[2:]) for outcome in once]
    moved = sum(abs(there - here) for here, there in enumerate(sources, start=1)) / len(sources)
    assert moved > 500 / 4  # a third of the length, where every order is as likely


def test_what_is_left_after_a_kill_keeps_its_order() -> None:
    whole = list(shuffled(candidates(500), seed=1))

    left = [outcome for outcome in candidates(500) if outcome in whole[200:]]

    assert list(shuffled(left, seed=1)) == whole[200:]


def test_what_is_no_candidate_passes_through_at_once() -> None:
    first, second = candidates(2)
    others: list[Outcome] = [Refusal("f:3", "no_messages", "", ""), Known(4), NotDrawn("f:5")]

    outcomes = shuffled([first, others[0], second, *others[1:]], seed=1)

    assert [next(outcomes) for _ in others] == others
    assert sorted(outcomes, key=str) == sorted([first, second], key=str)


def test_rows_with_equal_keys_keep_their_order() -> None:
    (first,) = candidates(1)
    assert isinstance(first, Candidate)
    same_id: list[Outcome] = [first._replace(source=f"g:{n}") for n in range(9)]
    others = candidates(50)[1:]

    mixed = [outcome for pair in zip(same_id, others, strict=False) for outcome in pair]

    assert [o for o in shuffled(mixed, seed=1) if o in same_id] == same_id


def test_no_sample_vouches_for_a_line_whose_other_samples_may_come_later() -> None:
    line = b'{"user_turns": ["a"]}'
    once = list(shuffled(read_candidates([("f:1", line)], Rules()), seed=1))
    twice = list(shuffled(read_candidates([("f:1", line)], Rules(draws=Draws(2))), seed=1))

    assert [bool(o.line_digest) for o in once if isinstance(o, Candidate)] == [True]
    assert [bool(o.line_digest) for o in twice if isinstance(o, Candidate)] == [False, False]


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    def endless(num_candidates: int) -> Iterator[Outcome]:
        (model,) = candidates(1)
        assert isinstance(model, Candidate)
        draw = random.Random(0)
        for n in range(num_candidates):
            yield model._replace(key=f"{draw.getrandbits(128):032x}", line=b"x" * 4000 + b"%d" % n)

    tracemalloc.start()
    num_shuffled = sum(1 for _ in shuffled(endless(25_000), seed=1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_shuffled == 25_000
    assert peak_bytes < 50 << 20  # of 100 MB of lines
