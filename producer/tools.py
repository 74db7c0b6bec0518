"""Tools that a conversation offers and calls that it records, normalised and checked.

Called by schemas.py (tools) and messages.py (calls) with what a row has, in any of the forms in
use: a list or JSON text, wrapped in {"type": "function", ...} or bare. Hands back the wrapped form
that chat templates take. A tool's `parameters` must be a schema by JSON Schema Draft 2020-12;
recorded arguments become an object wherever they are one.
"""

from __future__ import annotations

from functools import lru_cache
from reprlib import repr as short
from typing import Any

import orjson
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.json_values import parse_if_text, parse_text, sorted_text

NUM_CACHED_SCHEMAS = 4096  # a data set has some thousand tools at most, over a million rows
# Formats are notes, and patterns are written for ECMAScript, which Python can't judge.
_NO_FORMATS = FormatChecker(())
_MAY_BE_NULL = ("default", "const")  # where JSON Schema means null by null


def read_tools(value: object) -> list[Json]:
    """The tools on offer, wrapped; nothing, null and "" are no tools."""
    tools = parse_if_text(value, "bad_tools") or []
    if not isinstance(tools, list):
        raise PromptRejected("bad_tools", f"`tools` must be a list: {short(tools)}")
    wrapped = [_tool(tool) for tool in tools]
    names = [tool["function"]["name"] for tool in wrapped]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PromptRejected("bad_tools", f"two tools are named {short(twice)}")
    return wrapped


def read_calls(value: object) -> list[Json]:
    """Recorded calls, one or several. Arguments that are no object stay text."""
    calls = parse_if_text(value, "bad_tool_call") or []
    return [_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def check_renderable(calls: list[Json]) -> None:
    """Refuse calls that a chat template can't show: it reads arguments as an object."""
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            raise PromptRejected(
                "bad_tool_call", f"arguments must be an object: {short(arguments)}"
            )


def _tool(tool: object) -> Json:
    tool = parse_if_text(tool, "bad_tools")
    kind = tool.get("type") if isinstance(tool, dict) else None
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise PromptRejected("bad_tools", f"a tool without a name: {short(tool)}")
    if function is not tool and kind not in (None, "function"):
        raise PromptRejected("bad_tools", f"a tool of type {short(kind)}: {short(tool)}")
    return {"type": "function", "function": _with_checked_parameters(function)}


def _with_checked_parameters(given: Json) -> Json:
    parameters = parse_if_text(given.get("parameters"), "bad_tools")
    function = (
        given if parameters is given.get("parameters") else given | {"parameters": parameters}
    )
    if b"null" in orjson.dumps(function):
        function = _without_absent(function)
    if "parameters" in function:
        fault = _schema_fault(orjson.dumps(function["parameters"], option=orjson.OPT_SORT_KEYS))
        if fault:
            raise PromptRejected("bad_tools", f"{short(function['name'])}: {fault}")
    return function


def _without_absent(value: Any) -> Any:
    """Without the nulls that a table of many tools gives each for the others' fields."""
    if isinstance(value, list):
        return [_without_absent(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_absent(inner)
        for name, inner in value.items()
        if inner is not None or name in _MAY_BE_NULL
    }


@lru_cache(NUM_CACHED_SCHEMAS)
def _schema_fault(schema_json: bytes) -> str:
    """What is wrong with a tool's parameters; empty where nothing is."""
    schema = orjson.loads(schema_json)
    if not isinstance(schema, dict):
        return f"`parameters` must be an object: {short(schema)}"
    try:
        Draft202012Validator.check_schema(schema, format_checker=_NO_FORMATS)
    except SchemaError as error:
        return f"`parameters` is no JSON Schema: {error.json_path}: {error.message[:200]}"
    except RecursionError:
        return "`parameters` is nested too deeply"
    return ""


def _call(call: object) -> Json:
    call = parse_if_text(call, "bad_tool_call")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise PromptRejected("bad_tool_call", f"a call without a name: {short(call)}")
    arguments = function["arguments"] if "arguments" in function else function.get("parameters")
    wrapped: Json = {
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(arguments)},
    }
    call_id = call.get("id") if isinstance(call, dict) else None
    if call_id is None or call_id == "":
        return wrapped
    return {"id": call_id if isinstance(call_id, str) else sorted_text(call_id), **wrapped}


def _arguments(value: object) -> Json | str:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        return sorted_text(value)
    try:
        arguments = parse_text(value)
    except ValueError:
        return value
    return arguments if isinstance(arguments, dict) else value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip())
