"""Tool calls in every way that targets write them, and what only looks like one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.tool_calls import split_tool_calls

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "deep": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
    },
    {"type": "function", "function": {"name": "g"}},
]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def xml(name: str, arguments: dict[str, Any]) -> str:
    """As the templates of Qwen3-Coder, 3.5 and 3.6 write a call."""
    written = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in written.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"text": "Paris"},
        {"text": "12"},
        {"text": "null"},
        {"text": "\n two \n lines \n"},
        {"text": "<b>&amp;</b> </parameter> and </function>"},
        {"count": -3, "ratio": 0.5, "deep": True},
        {"ratio": None, "where": None},
        {"tags": ["a", "b"], "where": {"x": [1, {"y": None}]}},
        {"either": "12"},
        {"unknown": "[1]"},
    ],
)
def test_a_call_in_xml_is_read_back_with_the_types_of_its_schema(arguments: dict[str, Any]) -> None:
    assert split_tool_calls(xml("f", arguments), TOOLS) == ("", [call("f", arguments)])


@pytest.mark.parametrize(
    ("written", "value"), [("True", True), ("False", False), ("maybe", "maybe"), (" true ", True)]
)
def test_a_value_that_its_schema_cant_read_stays_text(written: str, value: object) -> None:
    assert split_tool_calls(xml("f", {"deep": written}), TOOLS)[1] == [call("f", {"deep": value})]


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    text = f"I look.\n{xml('f', {'count': 1})}\n{xml('g', {'any': '2'})}\nDone."

    content, calls = split_tool_calls(text, TOOLS)

    assert calls == [call("f", {"count": 1}), call("g", {"any": "2"})]
    assert content.split() == ["I", "look.", "Done."]


def test_both_ways_to_write_a_call_may_be_mixed() -> None:
    text = '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>' + xml("f", {"count": 2})

    assert split_tool_calls(text, TOOLS) == ("", [call("g", {"a": 1}), call("f", {"count": 2})])


plain = st.text(max_size=20).filter(lambda text: "<" not in text)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "text": plain,
                "count": st.integers(-(2**53), 2**53),
                "tags": st.lists(st.text(max_size=5), max_size=3),
                "where": st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
            },
        ),
        min_size=1,
        max_size=4,
    )
)
def test_calls_in_xml_round_trip(said: list[dict[str, Any]]) -> None:
    said = [{k: v for k, v in a.items() if "<tool_call>" not in json.dumps(v)} for a in said]
    text = "\n".join(xml("f", arguments) for arguments in said)

    assert split_tool_calls(text, TOOLS)[1] == [call("f", arguments) for arguments in said]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nsome text\n</function>\n</tool_call>",
        "<function=f>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=text>\nPar",
    ],
)
def test_a_malformed_call_in_xml_stays_content(text: str) -> None:
    good = xml("g", {})

    assert split_tool_calls(text, TOOLS) == (text, [])
    assert split_tool_calls(good + text, TOOLS) == (text, [call("g", {})])
    assert split_tool_calls(text + good, TOOLS) == (text, [call("g", {})])


LLAMA = '{"name": "f", "parameters": {"text": "Paris"}}'
CALLED = call("f", {"text": "Paris"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LLAMA, [CALLED]),
        (f"\n {LLAMA}\n", [CALLED]),
        (f"{LLAMA}; {LLAMA}", [CALLED, CALLED]),
        ('{"type": "function", "name": "f", "parameters": {"text": "Paris"}}', [CALLED]),
        (f"<|python_tag|>{LLAMA}", [CALLED]),
        ('<|python_tag|>{"name": "elsewhere", "arguments": {}}', [call("elsewhere", {})]),
    ],
)
def test_a_call_as_llama_writes_it_is_taken(text: str, calls: list[dict[str, Any]]) -> None:
    assert split_tool_calls(text, TOOLS) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "nobody", "parameters": {}}',  # no such tool: an answer in JSON
        '{"name": "f", "arguments": {}}',  # another's way to write it, without its marker
        '{"name": "f", "parameters": {}, "comment": "so"}',
        '{"name": "f", "parameters": "none"}',
        '{"type": "object", "name": "f", "parameters": {}}',
        f"{LLAMA} would be the call.",
        f"The call is {LLAMA}",
        f"[{LLAMA}]",
        "<|python_tag|>f.call(text='Paris')",
        f"<|python_tag|>{LLAMA} and so on",
        "{}",
        "{",
        "",
    ],
)
def test_json_that_may_be_an_answer_stays_one(text: str) -> None:
    assert split_tool_calls(text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>\n<function=f>\n<parameter=text>\n", "<tool_call>{", "<tool_call><function="],
)
def test_a_degenerate_loop_of_calls_is_read_in_no_time(piece: str) -> None:
    text = piece * 10_000

    started = time.thread_time()
    assert split_tool_calls(text, TOOLS) == (text, [])

    assert time.thread_time() - started < 2
