from __future__ import annotations

from typing import Any

import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.messages import normal_messages

CALL = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}


def normal(message: Any) -> Json:
    (read,) = normal_messages([message])
    return read


def reason_of(message: Any) -> str:
    with pytest.raises(PromptRejected) as refused:
        normal_messages([message])
    return refused.value.reason


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("system", "developer", "System"), "system"),
        (("user", "human", "Human", " USER "), "user"),
        (("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
        (("bing", "bard", "claude", "Assistant"), "assistant"),
        (("tool", "observation", "function_response", "ipython", "function"), "tool"),
    ],
)
def test_every_name_of_a_role_is_known(names: tuple[str, ...], role: str) -> None:
    for name in names:
        assert normal({"from": name, "value": "a"}) == {"role": role, "content": "a"}
        assert normal({"role": name, "content": "a"}) == {"role": role, "content": "a"}


@pytest.mark.parametrize("name", ["wizard", "", None, 7, ["user"], "user:"])
def test_an_unknown_role_is_refused(name: object) -> None:
    assert reason_of({"role": name, "content": "a"}) == "unknown_role"
    assert reason_of({"from": name, "value": "a"}) == "unknown_role"


def test_what_a_template_has_no_use_for_is_dropped() -> None:
    message = {"role": "user", "content": "a", "name": "Ann", "weight": 0, "toxic": False}

    assert normal(message) == {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "abc"),
        ({"type": "text", "text": "a"}, "a"),
        ([], ""),
    ],
)
def test_content_is_text_or_parts_of_it(content: object, text: str) -> None:
    assert normal({"role": "user", "content": content})["content"] == text
    assert normal({"role": "system", "content": content})["content"] == text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x.png"}},
        {"type": "image"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video"},
        {"image": "x.png"},
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_parts_that_are_no_text_are_refused_in_every_role(part: Json, role: str) -> None:
    if role == "tool" and "type" not in part:
        assert normal({"role": role, "content": [part]})["content"] == '[{"image":"x.png"}]'
    else:
        parts = [{"type": "text", "text": "What is this?"}, part]
        assert reason_of({"role": role, "content": parts}) == "unsupported_modality"


@pytest.mark.parametrize("content", [7, True, [7], [None], {"a": 1}, [{"type": "text"}], [["a"]]])
def test_content_that_is_no_text_is_refused(content: object) -> None:
    assert reason_of({"role": "user", "content": content}) == "bad_message"


@pytest.mark.parametrize("message", ["hi", None, 7, ["user", "hi"]])
def test_a_message_that_is_no_object_is_refused(message: object) -> None:
    assert reason_of(message) == "bad_message"


def test_calls_come_in_every_form_that_was_ever_current() -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    bare = {"name": "now", "arguments": '{"zone": "UTC"}'}

    for message in (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [bare]},
        {"role": "assistant", "content": None, "tool_calls": None, "function_call": bare},
        {"from": "function_call", "value": '{"name": "now", "arguments": {"zone": "UTC"}}'},
        {"from": "tool_call", "value": '[{"name": "now", "arguments": {"zone": "UTC"}}]'},
        {"from": "function_call", "value": bare},
    ):
        assert normal(message) == answer


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": "now()"},
        {"from": "function_call", "value": ""},
        {"from": "function_call", "value": None},
        {"role": "assistant", "tool_calls": "now()"},
        {"role": "assistant", "function_call": {"arguments": "{}"}},
    ],
)
def test_a_call_of_nothing_is_refused(message: Json) -> None:
    assert reason_of(message) == "bad_tool_call"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": ""},
        {"from": "gpt", "value": None},
    ],
)
def test_an_answer_that_says_nothing_was_not_recorded(message: Json) -> None:
    assert normal(message) == {"role": "assistant"}


def test_an_answers_reasoning_survives() -> None:
    message = {"role": "assistant", "content": "A", "reasoning_content": "Hm."}

    assert normal(message) == message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("12:00", "12:00"),
        (None, ""),
        ({"b": 1, "a": "é"}, '{"a":"é","b":1}'),
        (["a", "b"], '["a","b"]'),
        ([], "[]"),
        (42, "42"),
        (False, "false"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "cafe"}], '[{"type":"cafe"}]'),
        ([{"type": "text", "text": "a"}, {"b": 1}], '[{"text":"a","type":"text"},{"b":1}]'),
    ],
)
def test_what_a_tool_gave_back_becomes_text(content: object, text: str) -> None:
    assert normal({"role": "tool", "content": content}) == {"role": "tool", "content": text}


def test_a_result_keeps_what_names_its_call() -> None:
    legacy = {"role": "function", "name": "now", "content": "12:00"}
    numbered = {"role": "tool", "tool_call_id": 7, "name": "", "content": "12:00"}

    assert normal(legacy) == {"role": "tool", "name": "now", "content": "12:00"}
    assert normal(numbered) == {"role": "tool", "tool_call_id": "7", "content": "12:00"}
