"""Recorded messages, whatever their dialect -> messages in one normal form.

Called by schemas.py with the list that a row has. A normal message has a role of system, user,
assistant or tool and its content as text. An assistant's may have `reasoning_content` and
`tool_calls`; one without `content` stands for an answer that was not recorded. A tool's may have
`name` and `tool_call_id`. Nothing else of a message is kept. Normal messages come out as they are.
"""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.json_values import sorted_text
from producer.tools import read_calls

_CALL = "call"  # an assistant whose content is its calls

# Every role name in use, in lower case -> whose message it is.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("bing", "bard", "claude", "gemini"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call", "function_calls", "tool_calls"), _CALL),
    **dict.fromkeys(("tool", "observation", "function", "ipython", "environment"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "tool_result"), "tool"),
}

_TEXT_PARTS = ("text", "input_text", "output_text")
_MODALITIES = ("image", "audio", "video", "file")  # each a part of its content parts' type names


def normal_messages(messages: list[Any]) -> list[Json]:
    """One normal message for each. Raises PromptRejected."""
    normal = []
    for message in messages:  # for one message, half the time of a comprehension
        normal.append(_normal(message))
    return normal


def text_of(content: object) -> str:
    """A message's text; parts of it are joined as chat templates do, with nothing between."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, dict):
        return _text_of_part(content)
    if not isinstance(content, list):
        raise PromptRejected("bad_message", f"content must be text: {short(content)}")
    return "".join([_text_of_part(part) for part in content])


def _normal(message: object) -> Json:
    if not isinstance(message, dict):
        raise PromptRejected("bad_message", f"a message must be an object: {short(message)}")
    content = message.get("content")
    if isinstance(content, str) and message.get("role") == "user":
        return {"role": "user", "content": content}  # nearly all of a million rows' messages
    if content is None:
        content = message.get("value")
    role = _role(message)
    if role in ("user", "system"):
        return {"role": role, "content": text_of(content)}
    if role == "tool":
        return _tool_result(message, content)
    return _answer(message, content, is_call=role == _CALL)


def _role(message: Json) -> str:
    name = message.get("role") or message.get("from")
    if isinstance(name, str):
        role = ROLES.get(name) or ROLES.get(name.strip().lower())
        if role:
            return role
    raise PromptRejected("unknown_role", f"role {short(name)}")


def _answer(message: Json, content: object, *, is_call: bool) -> Json:
    answer: Json = {"role": "assistant"}
    recorded = content if is_call else message.get("tool_calls") or message.get("function_call")
    calls = read_calls(recorded)
    if is_call and not calls:
        raise PromptRejected("bad_tool_call", "a call without a name: nothing was called")
    text = "" if is_call else text_of(content)
    reasoning = text_of(message.get("reasoning_content"))
    if text or calls or reasoning:
        answer["content"] = text
    if reasoning:
        answer["reasoning_content"] = reasoning
    if calls:
        answer["tool_calls"] = calls
    return answer


def _tool_result(message: Json, content: object) -> Json:
    result: Json = {"role": "tool", "content": _result_text(content)}
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if isinstance(value, str) and value:
            result[key] = value
        elif value is not None and value != "":
            result[key] = sorted_text(value)
    return result


def _result_text(content: object) -> str:
    """What a tool gave back, as text; what is neither text nor text parts is JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and content and all(_is_part(item) for item in content):
        return text_of(content)
    return sorted_text(content)


def _is_part(item: object) -> bool:
    kind = item.get("type") if isinstance(item, dict) else None
    return isinstance(kind, str) and (kind in _TEXT_PARTS or _is_modality(kind))


def _is_modality(kind: str) -> bool:
    return any(word in kind for word in _MODALITIES)


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and any(_is_modality(name) for name in (str(kind), *part)):
        raise PromptRejected("unsupported_modality", f"a content part of type {short(kind)}")
    raise PromptRejected("bad_message", f"a content part of type {short(kind)}")
