"""The tool calls in an answer's text, in the ways in which models write them.

Called by answers.py, for content without its reasoning. Known: JSON or XML inside `<tool_call>`
(Hermes and Qwen3; Qwen3-Coder, 3.5 and 3.6), and JSON after `<|python_tag|>` or bare (Llama 3).
What is no well-formed call stays content, as it was written. XML values are text: the tool's schema
decides which are numbers, lists and the like. An argument may contain what looks like a marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from dflash_workers.contract.records import Json

CALL_START = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"

_START = re.compile(r"<tool_call>\s*(?=\{|<function=)")
_END = re.compile(r"\s*</tool_call>")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
_FUNCTION_END = re.compile(r"\s*</function>")
# A value ends where more of the call's frame follows, for it may contain an end tag itself.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)</parameter>\s*(?=<parameter=|</function>\s*</tool_call>)",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"[\s;]*")

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

_Found = tuple[Json | None, int]  # the call, None where it is malformed; where it ends


def split_tool_calls(text: str, tools: Sequence[Json]) -> tuple[str, list[Json]]:
    """The text around the well-formed tool calls, and these. `tools`: those that were offered."""
    if CALL_START in text:
        return _marked_calls(text, tools)
    before, tag, tagged = text.partition(PYTHON_TAG)
    if tag:
        calls = _bare_calls(tagged, ("parameters", "arguments"))
        return (before, calls) if calls else (text, [])
    if text.lstrip().startswith("{"):
        calls = _bare_calls(text, ("parameters",))
        offered = {tool["function"]["name"] for tool in tools}
        # JSON is an ordinary answer, too: it must be a call in every respect.
        if calls and all(call["function"]["name"] in offered for call in calls):
            return "", calls
    return text, []


def _marked_calls(text: str, tools: Sequence[Json]) -> tuple[str, list[Json]]:
    kept: list[str] = []
    calls: list[Json] = []
    at = 0
    while start := _START.search(text, at):
        begin = start.end()
        call, end = _json_call(text, begin) if text[begin] == "{" else _xml_call(text, begin, tools)
        kept.append(text[at : start.start() if call else end])
        calls += [call] if call else []
        at = end
    return "".join([*kept, text[at:]]), calls


def _json_call(text: str, at: int) -> _Found:
    """The call whose JSON begins at `at`."""
    value, end = _json_object(text, at)
    closing = _END.match(text, end)
    call = _call_of(value, ("arguments",))
    return (call, closing.end()) if call and closing else (None, at)


def _xml_call(text: str, at: int, tools: Sequence[Json]) -> _Found:
    """The call whose `<function=` begins at `at`. No value reaches into the next call."""
    stop = text.find(CALL_START, at)
    stop = len(text) if stop < 0 else stop
    function = _FUNCTION.match(text, at, stop)
    if not function:
        return None, at
    schemas = _schemas_of(function[1], tools)
    arguments: Json = {}
    end = function.end()
    while parameter := _PARAMETER.match(text, end, stop):
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = _typed(value, schemas.get(parameter[1]))
        end = parameter.end()
    function_end = _FUNCTION_END.match(text, end, stop)
    closing = _END.match(text, function_end.end(), stop) if function_end else None
    return (_call(function[1], arguments), closing.end()) if closing else (None, at)


def _bare_calls(text: str, keys: tuple[str, ...]) -> list[Json]:
    """The calls that the whole text is made of; none where it holds anything else."""
    calls: list[Json] = []
    at = _skipped(text, 0)
    while at < len(text):
        value, end = _json_object(text, at)
        call = _call_of(value, keys) if value.keys() <= {"name", "type", *keys} else None
        if not call or value.get("type", "function") != "function":
            return []
        calls.append(call)
        at = _skipped(text, end)
    return calls


def _skipped(text: str, at: int) -> int:
    found = _SEPARATOR.match(text, at)
    return found.end() if found else at


def _json_object(text: str, at: int) -> tuple[Json, int]:
    """The object that begins at `at` and where it ends; {} where there is none."""
    try:
        # The JSON's own end counts: an argument may well contain the end marker.
        _, end = json.JSONDecoder().raw_decode(text, at)
        value = orjson.loads(text[at:end])  # stricter: no NaN, no half of a surrogate pair
    except (ValueError, RecursionError):
        return {}, at
    return (value, end) if isinstance(value, dict) else ({}, at)


def _call_of(value: Json, keys: tuple[str, ...]) -> Json | None:
    arguments: object = next((value[key] for key in keys if key in value), {})
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return _call(value["name"], arguments)


def _call(name: str, arguments: Json) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _schemas_of(name: str, tools: Sequence[Json]) -> Json:
    """What the tool's schema says of each parameter."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(value: str, schema: object) -> Any:
    """The value as its schema has it; the text itself where that is not possible or not said."""
    if _is_text(schema):
        return value
    try:
        return orjson.loads(_PYTHON_WORDS.get(value, value))
    except orjson.JSONDecodeError:
        return value


def _is_text(schema: object) -> bool:
    if not isinstance(schema, dict):
        return True
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_is_text(option) for option in options)
    kinds = schema.get("type", "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])
