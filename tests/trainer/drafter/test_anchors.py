"""Where blocks may start."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.drafter.anchors import NO_ANCHOR, Document, draw_anchors, draw_packed_anchors


@given(
    prompt_len=st.integers(1, 30),
    answer_len=st.integers(0, 40),
    num_anchors=st.integers(1, 50),
    epoch=st.integers(0, 3),
)
def test_an_anchor_and_the_token_after_it_are_both_generated(
    prompt_len: int, answer_len: int, num_anchors: int, epoch: int
) -> None:
    length = prompt_len + answer_len
    carries_loss = [i >= prompt_len for i in range(length)]
    fit = [i for i in range(length - 1) if carries_loss[i] and carries_loss[i + 1]]

    slots = draw_anchors(prompt_len, length, num_anchors=num_anchors, draw=(0, epoch, "a"))

    anchors = [int(a) for a in slots if a != NO_ANCHOR]
    assert len(slots) == num_anchors
    assert set(anchors) <= set(fit)
    assert anchors == sorted(set(anchors))
    assert len(anchors) == min(num_anchors, len(fit))


def test_each_epoch_sample_and_seed_draws_anew() -> None:
    draws = [(0, 0, "a:0"), (0, 1, "a:0"), (1, 0, "a:0"), (0, 0, "b:0")]

    drawn = [tuple(draw_anchors(10, 500, num_anchors=20, draw=d)) for d in draws]

    assert len(set(drawn)) == len(draws)


def test_another_process_draws_the_same() -> None:
    here = draw_anchors(10, 500, num_anchors=5, draw=(3, 2, "key:1"))

    program = (
        "from trainer.drafter.anchors import draw_anchors;"
        "print(*draw_anchors(10, 500, num_anchors=5, draw=(3, 2, 'key:1')))"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert np.array_equal(here, [int(x) for x in there.stdout.split()])


DOCUMENTS = [
    Document(0, 10, 40, (0, 0, "a")),
    Document(40, 3, 4, (0, 0, "one answer token: no place")),
    Document(44, 5, 300, (0, 0, "b")),
]


def test_a_packed_row_draws_from_every_documents_answer_and_from_nothing_else() -> None:
    fit = {*range(10, 39), *range(49, 343)}

    everything = draw_packed_anchors(DOCUMENTS, 400)
    some = draw_packed_anchors(DOCUMENTS, 64)

    assert {int(a) for a in everything if a != NO_ANCHOR} == fit
    assert len(everything) == 400
    assert (everything[len(fit) :] == NO_ANCHOR).all()
    assert len(set(some.tolist())) == 64
    assert set(some.tolist()) <= fit
    assert some.tolist() == sorted(some.tolist())
    assert (some < 40).any()


def test_who_else_is_in_a_row_changes_how_many_anchors_a_sample_gets_but_not_their_order() -> None:
    alone = [draw_packed_anchors(DOCUMENTS[:1], n) for n in range(1, 20)]

    together = draw_packed_anchors(DOCUMENTS, 64)

    of_first = sorted(int(a) for a in together if a < 40)
    assert of_first == [int(a) for a in alone[len(of_first) - 1]]


def test_a_row_without_documents_has_no_anchor() -> None:
    assert draw_packed_anchors([], 3).tolist() == [NO_ANCHOR] * 3
