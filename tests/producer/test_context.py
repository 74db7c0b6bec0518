"""Which prompts fit the target's context, told at planning and cheaply."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from dflash_workers.contract.chat import Chat, load_tokenizer, own_template
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Sampling, Turn
from producer.context import ContextCheck

SAMPLING = Sampling(1.0, 1.0, -1, max_new_tokens=100, stop_token_ids=[2])
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"a, b": {}}}},
}


@pytest.fixture(scope="session")
def chat(model_dir: Path) -> Chat:
    """Its tokenizer normalises, as Qwen's does."""
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return Chat(tokenizer, own_template(tokenizer), {}, "escape")


def turns(*texts: str) -> list[Turn]:
    return [Turn([{"role": "user", "content": text}]) for text in texts]


def num_ids(chat: Chat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
    """As transformers counts them, all at once."""
    return len(
        chat.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
    )


@settings(deadline=None)
@given(
    st.text(
        st.characters(exclude_categories=["Cs"]) | st.sampled_from("\U0001d160\u0390x "),
        max_size=80,
    ),
    st.booleans(),
    st.booleans(),
)
def test_a_prompt_fits_to_the_last_id(
    chat: Chat, text: str, has_tools: bool, is_history: bool
) -> None:
    messages = turns(text)[0].messages
    if is_history:
        call = {"type": "function", "function": {"name": text, "arguments": {text: [text]}}}
        answer = {"role": "assistant", "content": text, "tool_calls": [call]}
        messages = [*messages, answer, {"role": "tool", "name": text, "content": text}]
    tools = [TOOL] if has_tools else []
    needed = num_ids(chat, messages, tools) + SAMPLING.max_new_tokens

    fitting = ContextCheck(chat, SAMPLING, needed).excess([Turn(messages)], tools)
    detail = ContextCheck(chat, SAMPLING, needed - 1).excess([Turn(messages)], tools)

    assert fitting is None
    assert detail and f"{needed - 100} ids, and 100 for" in detail and f" {needed - 1}" in detail


def test_the_room_for_the_answer_is_the_prompts_own(chat: Chat) -> None:
    asked = turns("word " * 100)
    context_len = num_ids(chat, asked[0].messages, []) + 50

    check = ContextCheck(chat, SAMPLING, context_len)

    assert check.excess(asked, []) is not None
    assert check.excess(asked, [], {"max_new_tokens": 51}) is not None
    assert check.excess(asked, [], {"max_new_tokens": 50}) is None


def test_later_turns_do_not_count(chat: Chat) -> None:
    check = ContextCheck(chat, SAMPLING, 400)

    assert check.excess(turns("short", "x " * 1000), []) is None
    assert check.excess(turns("x " * 1000, "short"), []) is not None


def test_only_a_prompt_that_could_be_too_long_is_rendered(chat: Chat) -> None:
    refusing = "{% if messages[0].content != 'x' %}{{ raise_exception('no') }}{% endif %}"
    check = ContextCheck(Chat(chat.tokenizer, refusing, {}, "escape"), SAMPLING, 1000)

    assert check.excess(turns("word " * 100), []) is None
    with pytest.raises(PromptRejected) as caught:
        check.excess(turns("word " * 1000), [])

    assert caught.value.reason == "template_error"


def test_what_is_too_deep_to_be_written_is_left_to_the_template(chat: Chat) -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}

    with pytest.raises(PromptRejected) as caught:
        ContextCheck(chat, SAMPLING, 100_000).excess(turns("x"), [tool])

    assert caught.value.reason == "template_error"


@pytest.mark.parametrize("text", ["The quick brown fox. ", "日本語", "x"])
def test_a_huge_prompt_is_refused_without_being_counted_whole(chat: Chat, text: str) -> None:
    check = ContextCheck(chat, SAMPLING, 40_960)
    huge = turns(text * (45_000_000 // len(text.encode())))
    started = time.monotonic()

    detail = check.excess(huge, [])

    assert detail is not None
    assert time.monotonic() - started < 5
