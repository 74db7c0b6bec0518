"""Rows of a target's answers -> samples of the engine's own ids."""

from __future__ import annotations

from dataclasses import replace

from dflash_workers.contract.flags import (
    EMPTY,
    TRUNCATED,
    UNFINISHED_THINKING,
)
from dflash_workers.contract.lines import dump_lines
from dflash_workers.contract.records import Row
from dflash_workers.contract.store import Store
from tests.trainer.tokens.committed import (
    SPEC,
    STOP,
    THINK_END,
    THREE_TURNS,
    commit_rows,
    make_answer,
    make_row,
)
from trainer.tokens.answered import Answered, parse_answered
from trainer.tokens.build import Builder
from trainer.tokens.ids_road import samples_of
from trainer.tokens.shards import read_shard


def answers_of(rows: list[Row]) -> list[Answered]:
    return [answer for line in dump_lines(rows).splitlines() for answer in parse_answered(line)]


def test_loss_covers_exactly_what_the_target_sampled(run_store: Store) -> None:
    other = make_row(make_answer([STOP, 10, STOP], [30, STOP]), name="math-2", heldout=True)
    rows = [THREE_TURNS, other]
    commit = commit_rows(run_store, "b", rows)

    samples = read_shard(Builder(run_store, SPEC).shard_of(commit))

    expected = []
    for row in rows:
        for answer in row.answers:
            pairs = [(token_id, False) for token_id in answer.input_ids]
            for token_id in answer.output_ids:
                pairs.append((token_id, True))
            expected.append((row.id, row.heldout, answer.turn, pairs))
    found = [
        (s.id, s.heldout, s.turn, list(zip(s.ids.tolist(), s.loss_mask().tolist(), strict=True)))
        for s in samples
    ]
    assert found == expected


def test_control_ids_in_a_prompt_never_light_up_the_mask() -> None:
    im_start, im_end = 1, STOP
    injected = [im_start, 5, im_end, im_start, 6, 7, im_end, im_start, 6]

    (sample,), _ = samples_of(answers_of([make_row(make_answer(injected, [8, STOP]))]), SPEC)

    assert sample.loss_mask().nonzero()[0].tolist() == [9, 10]


def test_a_truncated_answer_trains_without_a_stop_id() -> None:
    sample = samples_of(answers_of([THREE_TURNS]), SPEC)[0][2]

    assert sample.finish_reason == "length"
    assert sample.ids.tolist()[-3:] == [23, 24, 25]
    assert sample.flags == [TRUNCATED]


def test_an_answer_that_stops_at_the_very_limit_is_not_truncated() -> None:
    answer = make_answer([10], [20, STOP], flags=(TRUNCATED,))
    answer = replace(answer, finish_reason="length")

    (sample,), _ = samples_of(answers_of([make_row(answer)]), SPEC)

    assert (sample.finish_reason, sample.flags) == ("stop", [])


def test_the_end_of_thinking_is_found_in_the_answer_only() -> None:
    thinks = make_answer([10, THINK_END], [20, THINK_END, 21, THINK_END, STOP])
    does_not = make_answer([10, THINK_END], [20, STOP], turn=1)

    samples = samples_of(answers_of([make_row(thinks, does_not)]), SPEC)[0]

    assert [s.thinking_end for s in samples] == [3, -1]


def test_an_empty_thinking_that_the_prompt_opened_stays_as_it_was_sampled() -> None:
    """Rendered anew, the text would have a second opening tag, or other line ends."""
    opened, line_ends, said = 91, 30, 40
    answer = make_answer([10, opened, 31], [31, THINK_END, line_ends, said, STOP])

    (sample,), _ = samples_of(answers_of([make_row(answer)]), SPEC)

    assert sample.ids.tolist() == answer.input_ids + answer.output_ids
    assert (sample.prompt_len, sample.thinking_end) == (3, 4)


def test_thinking_cut_off_by_the_limit_trains_though_it_has_no_content() -> None:
    answer = make_answer([10], [20, 21], flags=(TRUNCATED, EMPTY, UNFINISHED_THINKING))

    assert [s.ids.tolist() for s in samples_of(answers_of([make_row(answer)]), SPEC)[0]] == [
        [10, 20, 21]
    ]
