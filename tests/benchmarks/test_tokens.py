from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import token_objects, token_peers, tokens
from trainer.tokens.shards import Sample


def test_the_conversations_are_the_same_at_every_call_and_some_have_three_turns() -> None:
    once = token_objects.make_conversations(60)

    assert once == token_objects.make_conversations(60)
    assert {len(messages) for messages in once} == {2, 6}


def sample(key: str, turn: int, ids: list[int], prompt_len: int) -> Sample:
    found = np.array(ids, np.int32)
    return Sample(key, key, turn, found, prompt_len, -1, False, "stop")


SAMPLES = [
    sample("a", 0, [5, 6, 7, 2], 2),
    sample("a", 1, [5, 6, 7, 2, 9, 8, 2], 5),
    sample("b", 0, [5, 3, 2], 1),
]


@pytest.mark.parametrize(
    ("mask", "share"),
    [([0, 0, 1, 1, 0, 1, 1, 0], 1), ([0, 0, 1, 1, 0, 1, 1, 1], 0.5), ([0, 1, 1, 1, 0, 1, 1], 0.5)],
)
def test_a_conversation_is_the_same_where_the_loss_of_all_its_answers_is(
    mask: list[int], share: float
) -> None:
    rows = [([5, 6, 7, 2, 9, 8, 2, 9], mask), ([5, 3, 2, 9], [0, 1, 1, 0])]

    assert token_peers.same_as_specforge(SAMPLES, rows) == share


def test_an_answer_is_the_same_but_for_the_line_end_behind_it() -> None:
    rows = [
        ([5, 6, 7, 2, 9], [0, 0, 1, 1, 1]),
        ([5, 6, 7, 2, 9, 8, 2, 9], [0, 0, 1, 1, 0, 1, 1, 1]),  # earlier answers carry loss, too
        ([5, 3, 2, 9, 9], [0, 1, 1, 1, 1]),  # more than a line end
    ]

    assert token_peers.same_as_speculators(SAMPLES, rows) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_every_figure_is_measured_from_one_real_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "ROWS", 10)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    assert tokens.main(["--samples", "60", "--conversations", "0"]) == 0

    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    values = {figure["figure"]: figure["value"] for figure in figures}
    assert values.keys() == {
        *("tokens.ids_rate", "tokens.ids_limit", "tokens.ids_ratio"),
        *("tokens.text_rate", "tokens.text_limit", "tokens.text_ratio"),
        "tokens.growth_mb",
    }
    for road in ("ids", "text"):
        rate, limit = values[f"tokens.{road}_rate"], values[f"tokens.{road}_limit"]
        assert values[f"tokens.{road}_ratio"] == pytest.approx(rate / limit)
        assert 0 < rate < limit * 1.5
