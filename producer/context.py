"""Whether a prompt and its answer fit the target's context, told before it costs a GPU anything.

Called by limits.py for each prompt. Most prompts are so short that their bytes alone say so: no id
covers less than a byte, save for what the tokenizer's normaliser adds. The others are rendered and
counted as the workers will count them, and counting ends where it is sure that they don't fit. Of
several turns only the first can be known here; the workers look at each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json, Sampling, Turn

# The characters that Unicode's normal forms make the most of: NFC and NFD 3 times as many bytes,
# NFKC and NFKD 11 times (UAX #15, "Maximum Expansion Factors").
_WIDEST = ("\U0001d160", "\u0390", "\ufdfa")
# Ids per byte of compact JSON: a "," may become a comma, a line break and indentation.
_IDS_PER_JSON_BYTE = 4

_NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
_USER: Json = {"role": "user", "content": "x"}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "x", "description": "x", "parameters": {"type": "object"}},
}


class ContextCheck:
    """Made once per run. Costs a prompt less than a microsecond, unless it is long."""

    def __init__(self, chat: Chat, sampling: Sampling, context_len: int) -> None:
        self._chat = chat
        self._max_new_tokens = sampling.max_new_tokens
        self._context_len = context_len
        self._ids_per_byte = _most_ids_per_byte(chat)
        # A message's own frame is part of a whole prompt of one message.
        self._ids_per_message = len(chat.prompt_ids([_USER], []))
        self._ids_of_frame = max(self._ids_per_message, _ids_with_tool(chat))

    def excess(
        self,
        turns: list[Turn],
        tools: list[Json],
        overrides: Mapping[str, Any] = _NO_OVERRIDES,
    ) -> str | None:
        """Why the first turn doesn't fit with its answer; None where it does.

        Raises PromptRejected for a prompt that was rendered and that the template refuses.
        """
        max_new_tokens = self._max_new_tokens
        if overrides:
            max_new_tokens = overrides.get("max_new_tokens", max_new_tokens)
        room = self._context_len - max_new_tokens
        messages = turns[0].messages
        if self._most_ids(messages, tools) <= room:
            return None
        num_ids = self._chat.count_ids(messages, tools, enough=room)
        if num_ids <= room:
            return None
        return (
            f"at least {num_ids} ids, and {max_new_tokens} for the answer, are more than the "
            f"target's {self._context_len}"
        )

    def _most_ids(self, messages: list[Json], tools: list[Json]) -> int:
        """No prompt of these has more ids; only its bytes are looked at."""
        most = self._ids_of_frame + self._ids_per_message * len(messages)
        for message in messages:
            text = message["content"]
            # Plain ASCII is what it is in every normal form.
            most += len(text) if text.isascii() else len(text.encode()) * self._ids_per_byte
            if len(message) > 2:
                most += self._most_ids_of_json({**message, "content": ""})
        if tools:
            most += self._most_ids_of_json(tools)
        return most

    def _most_ids_of_json(self, value: object) -> int:
        try:
            body = orjson.dumps(value)
        except TypeError:  # too deeply nested, say: the template will tell
            return self._context_len
        return len(body) * _IDS_PER_JSON_BYTE * (1 if body.isascii() else self._ids_per_byte)


def _most_ids_per_byte(chat: Chat) -> int:
    normalizer = chat.tokenizer.backend_tokenizer.normalizer
    if normalizer is None:
        return 1
    widened = ((len(normalizer.normalize_str(c).encode()), len(c.encode())) for c in _WIDEST)
    return max(math.ceil(after / before) for after, before in widened)


def _ids_with_tool(chat: Chat) -> int:
    try:
        return len(chat.prompt_ids([_USER], [_TOOL]))
    except PromptRejected:  # then every prompt with tools is
        return 0
