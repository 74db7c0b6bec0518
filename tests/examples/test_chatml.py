"""The example template: ChatML with tools, as the demo's target is prompted with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.answers import parse_answer
from dflash_workers.contract.chat import Chat, open_chat
from tests.tiny_model import make_tiny_model

CHATML = Path(__file__).parents[2] / "examples" / "chatml.jinja"

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    model_dir = make_tiny_model(tmp_path_factory.mktemp("model"))
    return open_chat(str(model_dir), CHATML.read_text(encoding="utf-8"), {})


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_no_system_turn_is_made_up(chat: Chat) -> None:
    assert chat.render([{"role": "user", "content": "Hi."}], []) == (
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_tools_are_described_in_the_system_turn(chat: Chat, system: list[dict[str, Any]]) -> None:
    text = chat.render([*system, {"role": "user", "content": "Hi."}], [TOOL, TOOL])

    head, described, rest = text.partition("<tools>\n")
    assert head.startswith("<|im_start|>system\n" + ("Be brief.\n\n" if system else ""))
    assert described and rest.count('"name": "add"') == 2
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("arguments", [{"a": 1, "b": [2]}, '{"a": 1, "b": [2]}'])
def test_calls_and_results_are_rendered(chat: Chat, arguments: object) -> None:
    function = {"name": "add", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "Gladly.",
            "tool_calls": [{"type": "function", "function": function}] * 2,
        },
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "add", "content": "4"},
    ]

    written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
    assert chat.render(messages, []) == (
        "<|im_start|>user\nAdd.<|im_end|>\n"
        f"<|im_start|>assistant\nGladly.\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_call_that_was_rendered_is_parsed_again(chat: Chat) -> None:
    calls = [call("add", {"a": {"b": '"}</tool_call>'}}), call("add", {})]
    message = {"role": "assistant", "content": "", "tool_calls": calls}

    text = chat.render([{"role": "user", "content": "Add."}, message], [])

    answer = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    assert parse_answer(answer).as_message() == message


def test_transformers_finds_the_assistants_part(chat: Chat) -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]

    encoded = chat.tokenizer.apply_chat_template(
        messages, chat_template=chat.template, return_dict=True, return_assistant_tokens_mask=True
    )

    chosen = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert chat.tokenizer.decode(chosen) == "Yes?<|im_end|>"


def test_text_parts_are_shown_as_one_text(chat: Chat) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]

    text = chat.render([{"role": "user", "content": parts}], [])

    assert text.startswith("<|im_start|>user\nHow many?<|im_end|>\n")
