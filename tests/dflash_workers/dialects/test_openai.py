"""OpenAI's words, asked of a server that renders the prompt itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, EngineUnavailable
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.dialects.openai import OpenAi
from dflash_workers.engine import Engine, Generation, Patience, Question
from tests.fake_engine import FakeEngine
from tests.tiny_model import VOCAB_SIZE

PATIENCE = Patience(request_s=2, token_s=0, away_s=0, backoff_s=0.05, abort_s=0.5)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def question_of(chat: Chat, spec: RunSpec, message: str, **fields: Any) -> Question:
    messages: list[Json] = [{"role": "user", "content": message}]
    return Question(
        input_ids=chat.prompt_ids(messages, fields.get("tools", [])),
        seed=11,
        sampling=spec.sampling,
        vocab_size=VOCAB_SIZE,
        messages=messages,
        **fields,
    )


def ask(fake: FakeEngine, question: Question, tokenizer: Any) -> Generation:
    async def once() -> Generation:
        engine = Engine(fake.url, 4, PATIENCE, dialect="openai", tokenizer=tokenizer)
        try:
            await engine.wait_until_there(1)
            await engine.look()
            return await engine.generate(question, heard=lambda ids: False, hear_every=1)
        finally:
            await engine.close()

    return asyncio.run(once())


def test_ids_come_back_where_the_server_gives_them(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    generation = ask(engine, question_of(chat, spec, "say:Good day."), chat.tokenizer)

    assert chat.text(generation.output_ids) == "Good day."
    assert generation.output_ids[-1] in spec.sampling.stop_token_ids
    assert (generation.finish_reason, generation.notes) == ("stop", ())


def test_every_sampling_value_is_said_and_the_model_named(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    question = question_of(chat, spec, "hello", tools=[TOOL])

    ask(engine, question, chat.tokenizer)

    (request,) = engine.requests
    sampling = spec.sampling
    assert {name: request[name] for name in ("temperature", "top_p", "top_k", "max_tokens")} == {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
    }
    assert request["stop_token_ids"] == sampling.stop_token_ids
    assert (request["seed"], request["model"], request["tools"]) == (11, "served-name", [TOOL])
    assert (request["return_token_ids"], request["skip_special_tokens"]) == (True, False)
    assert "stream" not in request


def test_text_alone_is_tokenised_again_and_says_so(
    engine: FakeEngine, chat: Chat, spec: RunSpec
) -> None:
    engine.gives_ids = False

    generation = ask(engine, question_of(chat, spec, "say:Good day."), chat.tokenizer)

    assert chat.text(generation.output_ids) == "Good day."
    assert generation.output_ids[-1] in spec.sampling.stop_token_ids
    assert generation.notes == ("text_road", "stop_id_appended")


@pytest.mark.parametrize("gives_ids", [True, False])
def test_another_template_behind_the_port_is_refused_by_name(
    engine: FakeEngine, chat: Chat, spec: RunSpec, gives_ids: bool
) -> None:
    engine.gives_ids = gives_ids
    engine.template = "<|im_start|>system\nBe nice.<|im_end|>\n" + chat.template

    with pytest.raises(EngineUnavailable, match="chat template"):
        ask(engine, question_of(chat, spec, "hello"), chat.tokenizer)


def test_the_switch_of_thinking_reaches_the_template(
    engine: FakeEngine, tokenizer: Any, spec: RunSpec
) -> None:
    kwargs = {"enable_thinking": False}
    chat = Chat(tokenizer, spec.chat_template, kwargs, spec.control_tokens)

    generation = ask(engine, question_of(chat, spec, "hello", template_kwargs=kwargs), tokenizer)

    assert generation.finish_reason == "stop"
    with pytest.raises(EngineUnavailable, match="another prompt"):
        ask(engine, question_of(chat, spec, "hello"), tokenizer)


def test_text_that_a_parser_took_apart_is_not_put_together_again() -> None:
    parted = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    choice = {"index": 0, "message": parted, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 9}

    with_ids = OpenAi().read({"choices": [choice | {"token_ids": [5, 2]}], "usage": usage})
    without = OpenAi().read({"choices": [choice], "usage": usage})

    assert (with_ids.output_ids, with_ids.text) == ([5, 2], None)
    assert (without.output_ids, without.text) == (None, None)


@pytest.mark.parametrize("is_vllm", [True, False])
def test_both_places_of_the_ids_are_known(is_vllm: bool) -> None:
    """vLLM says the prompt's beside the choices; SGLang in them, and later by another name."""
    choice: Json = {"index": 0, "message": {"content": "4"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body: Json
    if is_vllm:
        body = {"choices": [choice | {"token_ids": [5, 2], "stop_reason": 2}]}
        body["prompt_token_ids"] = [7, 8, 9]
    else:
        ids = {"response_token_ids": [5, 2], "prompt_token_ids": [7, 8, 9], "matched_stop": 2}
        body = {"choices": [choice | ids]}

    reply = OpenAi().read(body | {"usage": usage})

    assert (reply.input_ids, reply.output_ids, reply.matched) == ([7, 8, 9], [5, 2], 2)


def test_arguments_of_a_call_are_sent_as_json_text(chat: Chat, spec: RunSpec) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    question = Question([5], 0, spec.sampling, VOCAB_SIZE, messages=[message])

    asked = OpenAi().ask(question, "r1", 0, {})

    arguments = asked["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"city": "Köln"}
    assert call["function"] == {"name": "weather", "arguments": {"city": "Köln"}}


def test_a_server_without_models_is_none() -> None:
    async def once(url: str) -> None:
        engine = Engine(url, 1, PATIENCE, dialect="openai")
        try:
            await engine.look()
        finally:
            await engine.close()

    with pytest.raises((KeyError, IndexError, TypeError)):
        OpenAi().read_facts({"data": []})
    with pytest.raises(BadInput):
        asyncio.run(once("ftp://nowhere"))
