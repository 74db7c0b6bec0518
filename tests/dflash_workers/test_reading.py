"""From ids to an answer's parts: what its special tokens mean, and what of them is text."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from tokenizers import AddedToken

from dflash_workers.contract.chat import Chat
from dflash_workers.reading import Reader

TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}[THINK]...[/THINK]"
CALL = '{"name": "f", "parameters": {"a": 1}}'


@pytest.fixture(scope="module")
def special(tokenizer: Any) -> Any:
    """A tokenizer whose markers are special tokens, as Llama's and Mistral's are."""
    special = copy.deepcopy(tokenizer)
    markers = ["<|python_tag|>", "[THINK]", "[/THINK]"]
    special.add_tokens([AddedToken(marker, special=True) for marker in markers])
    return special


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_an_answer_of_plain_words_is_its_text(chat: Chat) -> None:
    reading = Reader(chat).read([1], ids_of(chat.tokenizer, "Just\nwords. 漢字"), [])

    assert reading.text == reading.shown == reading.parsed.content == "Just\nwords. 漢字"


@pytest.mark.parametrize(
    ("prompt_end", "said", "content", "reasoning", "is_thinking"),
    [
        ("<|im_start|>assistant\n", "Hello.", "Hello.", "", False),
        ("<|im_start|>assistant\n", "<think>\nHm.</think>Hello.", "Hello.", "Hm.", False),
        ("<|im_start|>assistant\n<think>\n", "Hm.</think>\n\nHello.", "Hello.", "Hm.", False),
        ("<|im_start|>assistant\n<think>\n", "Hm, so", "", "Hm, so", True),
        ("<think>\n\n</think>\n\n", "Hello.", "Hello.", "", False),
    ],
)
def test_thinking_may_have_been_opened_by_the_prompt(
    chat: Chat, prompt_end: str, said: str, content: str, reasoning: str, is_thinking: bool
) -> None:
    asked = ids_of(chat.tokenizer, f"What is the weather?<|im_end|>\n{prompt_end}")

    parsed = Reader(chat).read(asked, ids_of(chat.tokenizer, said), []).parsed

    assert (parsed.content, parsed.reasoning_content) == (content, reasoning)
    assert parsed.is_thinking is is_thinking


def test_special_tokens_are_no_text_but_are_shown(chat: Chat) -> None:
    said = "<think>a<|im_start|>b</think>c<|im_start|>user"

    reading = Reader(chat).read([1], ids_of(chat.tokenizer, said), [])

    assert (reading.parsed.reasoning_content, reading.parsed.content) == ("ab", "cuser")
    assert reading.shown == "c<|im_start|>user"
    assert "<|im_start|>" not in reading.text


def test_special_tokens_that_mark_a_part_are_read_as_markers(chat: Chat, special: Any) -> None:
    reader = Reader(dataclasses.replace(chat, tokenizer=special, template=TEMPLATE))

    said = f"[THINK]Hm.[/THINK]<|python_tag|>{CALL}"
    parsed = reader.read([1], ids_of(special, said), TOOLS).parsed

    assert (parsed.content, parsed.reasoning_content) == ("", "Hm.")
    assert [call["function"]["name"] for call in parsed.tool_calls] == ["f"]


def test_thinking_opened_by_a_special_token_of_the_prompt_is_seen(chat: Chat, special: Any) -> None:
    reader = Reader(dataclasses.replace(chat, tokenizer=special, template=TEMPLATE))

    parsed = reader.read(ids_of(special, "so[THINK]"), ids_of(special, "Hm."), []).parsed

    assert (parsed.reasoning_content, parsed.is_thinking) == ("Hm.", True)


def test_the_id_that_begins_a_call_is_the_tokenizers(chat: Chat) -> None:
    (call_id,) = ids_of(chat.tokenizer, "<tool_call>")

    assert Reader(chat).call_id == call_id
