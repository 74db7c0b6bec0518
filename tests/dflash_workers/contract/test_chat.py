"""Chat: the ids of a prompt, and an answer's text split into what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.chat import (
    Chat,
    ParsedAnswer,
    open_chat,
    own_template,
    parse_answer,
    tokenizer_sha256,
)
from dflash_workers.contract.errors import BadInput, Missing, PromptRejected
from tests.tiny_model import TEMPLATE, make_tiny_model

CHATML = Path(__file__).parents[3] / "examples" / "chatml.jinja"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def chat(model_dir: str) -> Chat:
    return open_chat(model_dir, CHATML.read_text(encoding="utf-8"), {})


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# --- answers -> messages ---


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
        ("Hm, so", True, "", "Hm, so"),
        ("<think>\nHm, so", True, "", "Hm, so"),
        ("<think>\nHm, so", False, "", "Hm, so"),
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
    assert parse_answer(thought, thinking=True) == ParsedAnswer("", thought, [])


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


# --- messages -> ids ---


def test_a_prompt_ends_with_the_header_of_the_answer(chat: Chat) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "\u2028 ünïcode 🙂"},
    ]

    ids = chat.prompt_ids(messages, [])

    assert chat.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n\u2028 ünïcode 🙂<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "Hi."}],
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
        [{"role": "user", "content": 3}],
        [{"content": "Hi."}],
    ],
)
def test_what_a_template_cannot_show_is_rejected(chat: Chat, messages: list[Any]) -> None:
    with pytest.raises(PromptRejected) as caught:
        chat.prompt_ids(messages, [])

    assert caught.value.reason == "template_error"


def test_the_template_is_the_runs_and_its_arguments_reach_it(model_dir: str) -> None:
    messages = [{"role": "user", "content": "Hi."}]

    chat = open_chat(model_dir, "{{ messages[0].content }}|{{ style }}", {"style": "plain"})

    assert chat.render(messages, []) == "Hi.|plain"


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_the_way_to_ids_and_back(chat: Chat, text: str) -> None:
    ids = chat.tokenizer.encode(text, add_special_tokens=False)

    assert chat.text(ids) == text


def test_the_stop_id_is_no_text(chat: Chat) -> None:
    ids = chat.tokenizer.encode("<think>Hm.</think>Yes.<|im_end|>", add_special_tokens=False)

    assert chat.parse(ids) == ParsedAnswer("Yes.", "Hm.", [])


# --- model folders ---


def test_the_end_of_thinking_has_an_id_where_the_tokenizer_has_one(chat: Chat) -> None:
    assert chat.tokenizer.decode([chat.thinking_end_id()]) == "</think>"


def test_a_model_brings_its_template(model_dir: str) -> None:
    assert own_template(model_dir) == TEMPLATE


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_folder_without_a_tokenizer_is_missing(tmp_path: Path, folder: str) -> None:
    with pytest.raises(Missing, match="--model"):
        open_chat(str(tmp_path / folder) if folder else "", "", {})


@pytest.mark.parametrize(
    "body", ["", "{", "{}", "[]", '{"added_tokens": [{}]}', '{"added_tokens": [], "model": {}}']
)
def test_a_broken_tokenizer_is_bad_input(tmp_path: Path, body: str) -> None:
    (tmp_path / "tokenizer.json").write_text(body)

    with pytest.raises(BadInput):
        open_chat(str(tmp_path), "", {})


def test_a_tokenizers_hash_is_of_its_content_alone(tmp_path: Path, model_dir: str) -> None:
    copy = make_tiny_model(tmp_path / "copy")
    same = tokenizer_sha256(str(copy))
    (copy / "config.json").write_text("{}")
    unmoved = tokenizer_sha256(str(copy))
    (copy / "tokenizer_config.json").write_text("{}")

    assert same == unmoved == tokenizer_sha256(model_dir)
    assert tokenizer_sha256(str(copy)) != same
