"""Which answers train."""

from __future__ import annotations

import pytest

from dflash_workers.contract.flags import (
    ANSWER_FLAGS,
    CONVERSATION_FLAGS,
    EMPTY,
    REPETITION,
    TRUNCATED,
    UNFINISHED_THINKING,
)
from trainer.tokens.fitness import TRAINS, skip_reason

STOP = 2


def test_the_table_judges_every_flag_that_there_is() -> None:
    assert TRAINS.keys() == {*ANSWER_FLAGS, *CONVERSATION_FLAGS}


@pytest.mark.parametrize(
    ("sampled", "flags", "reason"),
    [
        ([5, STOP], [], None),
        ([5, 6], [TRUNCATED], None),
        ([5, 6], [TRUNCATED, EMPTY, UNFINISHED_THINKING], None),
        ([5, 6], [TRUNCATED, UNFINISHED_THINKING, REPETITION], REPETITION),
        ([5, STOP], [EMPTY], EMPTY),
        ([STOP], [], EMPTY),
        ([], [], EMPTY),
        ([5, STOP], ["stop_id_appended"], None),  # a note on how it was made
    ],
)
def test_what_teaches_nothing_is_left_out(
    sampled: list[int], flags: list[str], reason: str | None
) -> None:
    assert skip_reason(sampled, flags, [STOP]) == reason
