"""OpenAI's `/v1/chat/completions`, for vLLM and other servers: messages in, ids out where offered.

Spoken by engine where the settings say so. The server renders the prompt; with `return_token_ids`
it says which ids these were, and they must be the run's. A server that gives text alone is taken
at its text, tokenised again, and the answer says so. Never streamed: SGLang gives no ids then.
Without ids as input a half-finished answer can't be gone on with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dflash_workers.contract.records import Json
from dflash_workers.questions import Question
from dflash_workers.replies import Reply

_OUTPUT_IDS = ("token_ids", "response_token_ids")  # vLLM and SGLang to 0.5.17; SGLang later


@dataclass(frozen=True, slots=True)
class OpenAi:
    """Methods that read raise KeyError, TypeError or ValueError on what is no such reply."""

    name: str = "OpenAI-compatible"
    path: str = "/v1/chat/completions"
    health_path: str = "/v1/models"
    abort_path: str = ""  # closing the connection aborts
    facts_path: str = "/v1/models"
    can_stream: bool = False
    takes_ids: bool = False

    def ask(self, question: Question, rid: str, stream_every: int, facts: Json) -> Json:
        """`facts`: as read_facts gave them, for the model's name."""
        sampling = question.sampling
        asked: Json = {
            "rid": rid,  # SGLang's name for it; vLLM's is the next one
            "request_id": rid,
            "model": facts.get("model", "default"),
            "messages": [_as_openai(message) for message in question.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "seed": question.seed,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "chat_template_kwargs": question.template_kwargs,
        }
        if question.tools:
            asked["tools"] = question.tools
        return asked

    def read(self, body: Json) -> Reply:
        """A whole reply."""
        (choice,) = body["choices"]
        message, usage = choice["message"], body["usage"]
        output_ids = next((choice[n] for n in _OUTPUT_IDS if choice.get(n) is not None), None)
        # What a parser has taken out of the text can't be put back as it was.
        is_parted = bool(message.get("tool_calls") or message.get("reasoning_content"))
        input_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
        return Reply(
            output_ids=None if output_ids is None else list(output_ids),
            text=None if is_parted else str(message.get("content") or ""),
            finish=choice["finish_reason"],
            num_input=int(usage["prompt_tokens"]),
            num_output=int(usage["completion_tokens"]),
            matched=choice.get("matched_stop") or choice.get("stop_reason"),
            input_ids=None if input_ids is None else list(input_ids),
            has_special=True,
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )

    def read_facts(self, body: Json) -> Json:
        """What it serves."""
        model = body["data"][0]
        facts = {"dialect": "openai", "model": str(model["id"])}
        return facts | ({"context_length": n} if (n := model.get("max_model_len")) else {})

    def ask_log_probs(self, input_ids: list[int]) -> Json | None:
        """None: it can't be asked in ids."""
        return None

    def read_log_probs(self, body: Json) -> list[float]:
        """None, as it isn't asked."""
        return []


def _as_openai(message: Json) -> Json:
    """Arguments of a call are JSON text there."""
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
