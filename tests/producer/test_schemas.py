from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.conversations import turns_of
from producer.schemas import Shape, read_conversation

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
DETECT = Shape()
SYSTEM = {"role": "system", "content": "Be brief."}
A, B = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
ANSWER = {"role": "assistant", "content": "A"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "A"}


def reason_of(row: Json, shape: Shape = DETECT) -> str:
    with pytest.raises(PromptRejected) as refused:
        read_conversation(row, shape)
    return refused.value.reason


@pytest.mark.parametrize(
    ("schema", "row", "messages"),
    [
        ("messages", {"messages": [SYSTEM, A, ANSWER]}, [SYSTEM, A, ANSWER]),
        ("messages", {"messages": json.dumps([A, ANSWER])}, [A, ANSWER]),
        ("sharegpt", {"conversations": [HUMAN, GPT]}, [A, ANSWER]),
        ("sharegpt", {"conversation": [A, ANSWER]}, [A, ANSWER]),
        ("sharegpt", {"conversations": json.dumps([HUMAN])}, [A]),
        ("sharegpt", {"conversations": [HUMAN], "system": "Be brief."}, [SYSTEM, A]),
        ("user_turns", {"user_turns": ["a", "b"]}, [A, {"role": "assistant"}, B]),
        ("user_turns", {"turns": ["a"]}, [A]),
        ("user_turns", {"user_turns": '["a"]', "system": "Be brief."}, [SYSTEM, A]),
        ("alpaca", {"instruction": "a", "input": "", "output": "A"}, [A, ANSWER]),
        ("alpaca", {"instruction": "a", "input": None, "output": None}, [A]),
        (
            "alpaca",
            {"instruction": "Add.", "input": "1 2"},
            [{"role": "user", "content": "Add.\n\n1 2"}],
        ),
        ("alpaca", {"instruction": "a", "output": 5}, [A, {"role": "assistant", "content": "5"}]),
        ("prompt", {"prompt": "a", "response": "A"}, [A]),
        ("prompt", {"question": "a"}, [A]),
        ("prompt", {"instruction": "a"}, [A]),
        ("prompt", {"query": "a", "text": "b"}, [A]),
        ("prompt", {"text": "a"}, [A]),
        ("prompt", {"system_prompt": "Be brief.", "question": "a"}, [SYSTEM, A]),
        ("prompt", {"prompt": [A, ANSWER, B]}, [A, ANSWER, B]),
        ("openai_batch", {"custom_id": "r", "body": {"messages": [A]}}, [A]),
        ("openai_batch", {"custom_id": "r", "body": {"prompt": "a"}}, [A]),
        ("openai_batch", {"custom_id": "r", "body": json.dumps({"messages": [A]})}, [A]),
    ],
)
def test_a_rows_schema_is_detected(schema: str, row: Json, messages: list[Json]) -> None:
    conversation = read_conversation(row, DETECT)

    assert (conversation.schema, conversation.messages) == (schema, messages)
    assert read_conversation(row, Shape(schema=schema)) == conversation


@pytest.mark.parametrize("absent", [None, [], ""])
def test_a_field_that_is_null_or_empty_is_as_good_as_absent(absent: object) -> None:
    row = {
        "messages": absent,
        "conversations": absent,
        "user_turns": absent,
        "turns": absent,
        "prompt": absent,
        "question": "a",
        "tools": absent,
        "sampling": absent,
        "system": absent,
        "image": absent,
    }

    conversation = read_conversation(row, DETECT)

    assert (conversation.schema, conversation.messages) == ("prompt", [A])
    assert (conversation.tools, conversation.sampling) == ([], {})


def test_no_row_is_read_by_what_the_rows_before_it_had() -> None:
    num_tools = 0
    for n in range(10_000):
        with_tools = n >= 5_000
        argument: Any = str(n) if with_tools else n
        call = {"name": "now", "arguments": {"n": argument}}
        row = {
            "messages": [A, {"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [TOOL] if with_tools else None,
        }

        conversation = read_conversation(row, DETECT)

        num_tools += len(conversation.tools)
        recorded = conversation.messages[1]["tool_calls"][0]["function"]
        assert recorded["arguments"] == {"n": argument}
    assert num_tools == 5_000


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": {"role": "user", "content": "a"}},
        {"turns": 3},
        {"turns": [1, 2]},
        {"prompt": 7},
        {"prompt": ["a"]},
        {"text": [{"start": 0}]},
        {"custom_id": "r", "body": {"model": "m"}},
        {"custom_id": "r", "body": "hi"},
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_keys(row: Json) -> None:
    with pytest.raises(PromptRejected) as refused:
        read_conversation(row, DETECT)

    assert refused.value.reason == "no_messages"
    assert all(repr(name) in refused.value.detail for name in row)


@pytest.mark.parametrize("name", ["image", "images", "audio", "audios", "video", "videos"])
def test_a_row_with_more_than_text_is_refused(name: str) -> None:
    assert reason_of({"prompt": "a", name: ["x"]}) == "unsupported_modality"


def test_what_is_not_read_is_kept() -> None:
    row = {"id": "p", "heldout": True, "user_turns": ["a"], "topic": "x", "level": 3}

    assert read_conversation(row, DETECT).rest == {
        "id": "p",
        "heldout": True,
        "topic": "x",
        "level": 3,
    }


def test_a_batch_request_brings_tools_and_sampling_and_keeps_the_rest_of_its_body() -> None:
    row = {
        "custom_id": "r1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "m",
            "messages": [A],
            "tools": [TOOL],
            "temperature": 0,
            "max_completion_tokens": 9,
            "n": 2,
            "stream": True,
        },
    }

    read = read_conversation(row, DETECT)

    assert (read.messages, read.tools) == ([A], [TOOL])
    assert read.sampling == {"temperature": 0.0, "max_new_tokens": 9}
    assert read.rest == {
        "custom_id": "r1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "n": 2, "stream": True},
    }


def test_a_rows_own_tools_and_sampling_stand_before_its_bodys() -> None:
    body = {"messages": [A], "tools": [{"name": "other"}], "temperature": 1}
    row = {"custom_id": "r", "body": body, "tools": [TOOL], "sampling": {"top_k": 5}}

    read = read_conversation(row, DETECT)

    assert (read.tools, read.sampling) == ([TOOL], {"top_k": 5})
    assert read.rest["body"] == {"tools": [{"name": "other"}], "temperature": 1}


def test_legacy_functions_are_tools() -> None:
    functions = [{"name": "now", "parameters": {"type": "object"}}]

    assert read_conversation({"messages": [A], "functions": functions}, DETECT).tools == [TOOL]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": ["hi"]}, "bad_message"),
        ({"user_turns": [7]}, "bad_message"),
        ({"messages": [A], "system": {"os": "x"}}, "bad_message"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_modality"),
        ({"prompt": "a", "sampling": {"temperatur": 1}}, "bad_sampling"),
        ({"prompt": "a", "sampling": "random"}, "bad_sampling"),
        ({"custom_id": "r", "body": {"prompt": "a", "top_p": "x"}}, "bad_sampling"),
        ({"prompt": "a", "tools": "not json"}, "bad_tools"),
        ({"prompt": "a", "tools": [TOOL, TOOL]}, "bad_tools"),
        ({"messages": [A, {"role": "assistant", "tool_calls": ["now"]}]}, "bad_tool_call"),
        ({"prompt": "a", "blob": b"x"}, "malformed_json"),
    ],
)
def test_a_row_that_can_not_be_read_is_refused_with_its_reason(row: Json, reason: str) -> None:
    assert reason_of(row) == reason


@pytest.mark.parametrize("depth", [240, 300, 1000, 5000])
def test_a_row_nested_too_deeply_is_refused_or_read_but_never_raises(depth: int) -> None:
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    text = "[" * depth + "]" * depth

    for row in (
        {"messages": [A], "metadata": deep},
        {"messages": [A], "tools": [{"name": "now", "parameters": {"enum": deep}}]},
        {"messages": [{"role": "user", "content": deep}]},
        {"messages": [A], "tools": text},
        {"conversations": text},
    ):
        try:
            read_conversation(row, DETECT)
        except PromptRejected as error:
            assert error.reason in {"malformed_json", "bad_tools", "bad_message", "no_messages"}


def test_half_a_surrogate_pair_anywhere_in_a_mapping_is_replaced() -> None:
    row = {"prompt": "a\udcb2b", "topic": ["\ud83d"], "tools": '[{"name": "\\udcb2"}]'}

    read = read_conversation(row, DETECT)

    assert read.messages == [{"role": "user", "content": "a\ufffdb"}]
    assert read.rest == {"topic": ["\ufffd"]}
    assert read.tools[0]["function"]["name"] == "\ufffd"


def test_the_examples_have_the_outcomes_that_they_were_written_for() -> None:
    outcomes: Counter[str] = Counter()
    for line in EXAMPLES.read_bytes().split(b"\n"):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict):
            try:
                turns_of(read_conversation(row, DETECT).messages, "rollout")
                outcomes["read"] += 1
            except PromptRejected as error:
                outcomes[error.reason] += 1

    assert outcomes.pop("read") > 150
    assert outcomes == {
        "no_messages": 1,
        "no_user_turn": 1,
        "unknown_role": 1,
        "unsupported_modality": 1,
        "bad_tools": 1,
    }
