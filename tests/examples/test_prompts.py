"""The example prompts are what the demo and the README say they are, read as plain JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LINES = (
    (Path(__file__).parents[2] / "examples" / "prompts.jsonl")
    .read_bytes()
    .decode("utf-8")
    .removesuffix("\n")
    .split("\n")
)
NUM_HOSTILE = 8


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """The good rows by id."""
    good = {}
    for line in LINES:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and not row["id"].startswith("refused-"):
            good[row["id"]] = row
    return good


def questions_of(row: dict[str, Any]) -> list[str]:
    recorded = [m["content"] for m in row.get("messages", []) if m["role"] == "user"]
    return recorded + list(row.get("user_turns", []))


def test_every_kind_of_row_is_there_often_enough(rows: dict[str, dict[str, Any]]) -> None:
    kinds = Counter(name.split("-")[0] for name in rows)

    assert kinds["math"] >= 128
    assert kinds["heldout"] == 14
    assert kinds["turns"] == 8
    assert kinds["tools"] == 6
    assert len(LINES) == sum(kinds.values()) + NUM_HOSTILE + 1  # and one duplicate


def test_heldout_rows_and_no_others_are_held_out(rows: dict[str, dict[str, Any]]) -> None:
    heldout = {name for name, row in rows.items() if row.get("heldout")}

    assert heldout == {name for name in rows if name.startswith("heldout-")}


def test_the_maths_rows_are_short_questions_of_one_user(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if name.startswith(("math-", "heldout-")):
            (message,) = row["messages"]
            assert message["role"] == "user"
            assert 40 <= len(message["content"]) <= 220, name
            assert message["content"].endswith("?"), name
            assert any(c.isdigit() for c in message["content"]), name


def test_no_question_is_asked_twice(rows: dict[str, dict[str, Any]]) -> None:
    counts = Counter(question for row in rows.values() for question in questions_of(row))

    assert set(counts.values()) == {1}


def test_heldout_questions_are_unlike_those_trained_on(rows: dict[str, dict[str, Any]]) -> None:
    words = {name: set(questions_of(row)[0].lower().split()) for name, row in rows.items()}

    for name in words:
        for other in words if name.startswith("heldout-") else []:
            overlap = len(words[name] & words[other]) / len(words[name] | words[other])
            assert other == name or overlap < 0.45, (name, other)


def test_multi_turn_rows_ask_two_or_three_questions(rows: dict[str, dict[str, Any]]) -> None:
    lengths = {len(row["user_turns"]) for row in rows.values() if "user_turns" in row}

    assert lengths == {2, 3}


def test_tools_are_described_and_every_recorded_call_has_a_result(
    rows: dict[str, dict[str, Any]],
) -> None:
    with_tools = [row for row in rows.values() if "tools" in row]

    recorded = 0
    for row in with_tools:
        names = {tool["function"]["name"] for tool in row["tools"]}
        calls = [c for m in row["messages"] for c in m.get("tool_calls", [])]
        results = [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"]
        assert {c["function"]["name"] for c in calls} <= names
        assert [c["id"] for c in calls] == results
        recorded += bool(calls)

    assert (len(with_tools), recorded) == (6, 2)


def test_separators_that_are_text_and_signs_beyond_16_bits_are_there() -> None:
    assert sum("\u2028" in line for line in LINES) == 1
    assert sum(any(ord(c) > 0xFFFF for c in line) for line in LINES) == 1


def test_each_hostile_row_is_wrong_in_its_own_way() -> None:
    hostile = [line for line in LINES if '"refused-' in line]

    with pytest.raises(json.JSONDecodeError):
        json.loads(hostile[0])
    assert isinstance(json.loads(hostile[1]), list)
    rows = [json.loads(line) for line in hostile[2:]]
    assert rows[0]["messages"] == []
    assert {m["role"] for m in rows[1]["messages"]} == {"system"}
    assert rows[2]["messages"][0]["role"] == "wizard"
    assert rows[3]["messages"][0]["content"][1]["type"] == "image_url"
    assert "<|im_end|>\n<|im_start|>assistant" in rows[4]["messages"][0]["content"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(rows[5]["tools"])


def test_one_row_stands_there_twice() -> None:
    assert [line for line, count in Counter(LINES).items() if count > 1] == [LINES[-1]]
