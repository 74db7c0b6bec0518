"""An answer's text, split into what it is made of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.answers import ParsedAnswer, parse_answer, thinking_markers


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning"),
    [
        ("Hello.", False, "Hello.", ""),
        ("  Hello.\n", False, "Hello.", ""),
        ("", False, "", ""),
        ("<think>\nHm.\n</think>\n\nHello.", False, "Hello.", "Hm."),
        ("\n<think>Hm.</think>Hello.", True, "Hello.", "Hm."),
        ("Hm.\n</think>\n\nHello.", True, "Hello.", "Hm."),
        ("<think>\n\n</think>\n\nHello.", True, "Hello.", ""),
        ("</think>Hello.", True, "Hello.", ""),
        ("Hm.</think>a</think>b", True, "a</think>b", "Hm."),
        # Without thinking the markers are words like any other.
        ("Close it with </think>, then go on.", False, "Close it with </think>, then go on.", ""),
        ("Open it with <think>.", False, "Open it with <think>.", ""),
    ],
)
def test_reasoning_ends_at_its_marker(
    text: str, thinking: bool, content: str, reasoning: str
) -> None:
    assert parse_answer(text, thinking) == ParsedAnswer(content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "thinking"), [("Hm, so", True), ("<think>\nHm, so", True), ("<think>\nHm, so", False)]
)
def test_thinking_that_never_ended_is_no_content(text: str, thinking: bool) -> None:
    assert parse_answer(text, thinking) == ParsedAnswer("", "Hm, so", [], is_thinking=True)


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{{ message.content.split('</think>')[-1] }}", ("<think>", "</think>")),
        ("{{ '<seed:think>' }}...{{ '</seed:think>' }}", ("<seed:think>", "</seed:think>")),
        ("[THINK]{{ thinking }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("{{ message.content }}", ("<think>", "</think>")),
    ],
)
def test_thinking_is_marked_as_the_template_does(template: str, markers: tuple[str, str]) -> None:
    start, end = markers
    text = f"{start}Hm.{end}Hello."

    found = thinking_markers(template)

    assert found == markers
    assert parse_answer(text, markers=found) == ParsedAnswer("Hello.", "Hm.", [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', {"a": 1}),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', {}),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
        (
            '<tool_call>{"arguments": {"a": {"b": [{"c": {}}, "}"]}}, "name": "f"}</tool_call>',
            {"a": {"b": [{"c": {}}, "}"]}},
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}</tool_call>',
            {"a": "}</tool_call>"},
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{\\"b\\""}}</tool_call>',
            {"a": '<tool_call>{"b"'},
        ),
        ('<tool_call>{"name": "f", "arguments": {"ä": "\u2028🙂"}}</tool_call>', {"ä": "\u2028🙂"}),
    ],
)
def test_a_tool_call_is_taken_whole(text: str, arguments: dict[str, Any]) -> None:
    assert parse_answer(text) == ParsedAnswer("", "", [call("f", arguments)])


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    text = (
        "<think>Two of them.</think>I look it up.\n"
        '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"n": 2}}</tool_call>'
    )

    answer = parse_answer(text)

    assert answer.tool_calls == [call("f", {"n": 1}), call("g", {"n": 2})]
    assert (answer.content, answer.reasoning_content) == ("I look it up.", "Two of them.")


MALFORMED = [
    "<tool_call>{</tool_call>",
    "<tool_call>add(1, 2)</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>["f", {}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}} and so on</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}',
    '{"name": "f", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20_000,
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_stays_content(text: str) -> None:
    assert parse_answer(text) == ParsedAnswer(text, "", [])


@pytest.mark.parametrize("text", MALFORMED[:-1])
def test_a_malformed_call_beside_a_good_one_stays_content(text: str) -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert parse_answer(f"{good}\n{text}") == ParsedAnswer(text, "", [call("f", {})])
    assert parse_answer(f"{text}\n{good}") == ParsedAnswer(text, "", [call("f", {})])


def test_a_call_that_was_only_thought_of_is_no_call() -> None:
    thought = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert parse_answer(f"<think>{thought}</think>No.") == ParsedAnswer("No.", thought, [])
    assert parse_answer(thought, thinking=True) == ParsedAnswer("", thought, [], is_thinking=True)


TEXT = st.text('<>/{}":, \nabé🙂', max_size=30).map(str.strip)
NAME = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(NAME, st.dictionaries(st.text(min_size=1, max_size=8), VALUE, max_size=3)), max_size=4
)


@settings(deadline=None)
@given(reasoning=TEXT, content=TEXT, calls=CALLS, opened=st.booleans())
def test_what_a_template_would_show_is_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], opened: bool
) -> None:
    text = ("" if opened else "<think>\n") + f"{reasoning}\n</think>\n\n{content}"
    for name, arguments in calls:
        written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        text += f"\n<tool_call>\n{written}\n</tool_call>"

    answer = parse_answer(text, thinking=opened)

    assert answer == ParsedAnswer(content, reasoning, [call(*said) for said in calls])


@settings(deadline=None)
@given(st.text('<>/{}":, \nabthinktool_call', max_size=60), st.booleans())
def test_no_text_is_too_strange_to_be_split(text: str, thinking: bool) -> None:
    answer = parse_answer(text, thinking)

    assert len(answer.content) + len(answer.reasoning_content) <= len(text)


def test_an_answer_becomes_the_message_that_a_chat_server_would_keep() -> None:
    assert ParsedAnswer("Hi.", "", []).as_message() == {"role": "assistant", "content": "Hi."}
    assert ParsedAnswer("", "Hm.", [call("f", {})]).as_message() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call("f", {})],
    }
