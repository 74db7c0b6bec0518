from __future__ import annotations

import json

import pytest

from benchmarks import tokens


def test_the_conversations_are_the_same_at_every_call_and_some_have_three_turns() -> None:
    once = tokens.make_conversations(60)

    assert once == tokens.make_conversations(60)
    assert {len(messages) for messages in once} == {2, 6}


@pytest.mark.slow
def test_every_figure_is_measured_from_one_real_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "ROWS", 10)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    assert tokens.main(["--samples", "60"]) == 0

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
