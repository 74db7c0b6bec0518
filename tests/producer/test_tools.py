from __future__ import annotations

import json

import orjson
import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.tools import check_renderable, read_calls, read_tools

PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
BARE = {"name": "now", "description": "The time.", "parameters": PARAMETERS}
WRAPPED = {"type": "function", "function": BARE}


def call(arguments: object, **more: object) -> Json:
    return {"type": "function", "function": {"name": "now", "arguments": arguments}, **more}


def arguments_of(value: object) -> object:
    (read,) = read_calls(value)
    return read["function"]["arguments"]


def nested(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"p": schema}}
    return schema


@pytest.mark.parametrize(
    "tools",
    [
        [WRAPPED],
        [BARE],
        json.dumps([WRAPPED]),
        json.dumps([BARE]),
        [json.dumps(WRAPPED)],
        [{"function": BARE}],
        [{**BARE, "parameters": json.dumps(PARAMETERS)}],
    ],
)
def test_tools_come_as_a_list_or_as_json_text_wrapped_or_bare(tools: object) -> None:
    assert read_tools(tools) == [WRAPPED]


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_no_tools_are_no_tools(tools: object) -> None:
    assert read_tools(tools) == []


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object", "properties": {}},
        # Python's `re` can't compile this, and ECMAScript can.
        {"type": "object", "properties": {"word": {"type": "string", "pattern": r"^\p{L}+$"}}},
        {"city": {"type": "string"}},
        {"$defs": {"a": True}, "$ref": "#/$defs/a"},
    ],
)
def test_whatever_is_a_json_schema_may_be_a_tools_parameters(parameters: Json) -> None:
    (tool,) = read_tools([{"name": "now", "parameters": parameters}])

    assert tool["function"]["parameters"] == parameters


def test_a_tool_needs_no_parameters() -> None:
    assert read_tools([{"name": "now"}]) == [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize(
    "tools",
    [
        "not json",
        {"name": "now"},
        7,
        ["now"],
        [None],
        [{"type": "function"}],
        [{"function": "now"}],
        [{"function": {"name": ""}}],
        [{"name": 7}],
        [{"type": "custom", "function": {"name": "now"}}],
        [{"name": "now", "parameters": "not json"}],
        [{"name": "now", "parameters": []}],
        [{"name": "now", "parameters": True}],
        [{"name": "now", "parameters": {"type": "objekt"}}],
        [{"name": "now", "parameters": {"properties": {"zone": "string"}}}],
        [{"name": "now", "parameters": {"required": "zone"}}],
        [{"name": "now", "parameters": nested(120)}],
        [WRAPPED, BARE],
    ],
)
def test_tools_that_no_model_could_be_offered_are_refused(tools: object) -> None:
    with pytest.raises(PromptRejected) as refused:
        read_tools(tools)

    assert refused.value.reason == "bad_tools"
    assert len(refused.value.detail) < 400


def test_what_is_wrong_with_a_schema_is_said_whatever_the_order_of_its_keys() -> None:
    faulty = {"zone": {"type": "text"}, "hour": {"type": "count"}}

    details = []
    for properties in (faulty, dict(reversed(faulty.items()))):
        with pytest.raises(PromptRejected) as refused:
            read_tools([{"name": "now", "parameters": {"properties": properties}}])
        details.append(refused.value.detail)

    assert details[0] == details[1]
    assert "'now'" in details[0]


@pytest.mark.parametrize("arguments", [{"zone": "UTC"}, '{"zone": "UTC"}', '{"zone":"UTC"}\n'])
def test_arguments_become_an_object_where_they_are_one(arguments: object) -> None:
    assert arguments_of([call(arguments)]) == {"zone": "UTC"}


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    assert arguments_of([call(arguments)]) == {}
    assert arguments_of([{"name": "now"}]) == {}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("not json", "not json"),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("null", "null"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 2000, "[" * 2000),
    ],
)
def test_arguments_that_are_no_object_stay_text_and_can_not_be_shown(
    arguments: object, kept: str
) -> None:
    calls = read_calls([call(arguments)])

    assert calls[0]["function"]["arguments"] == kept
    with pytest.raises(PromptRejected, match="bad_tool_call"):
        check_renderable(calls)


def test_arguments_with_half_a_surrogate_pair_can_be_written_again() -> None:
    arguments = arguments_of([call('{"sign": "\\ud83d"}')])

    assert arguments == {"sign": "\ufffd"}
    assert orjson.dumps(arguments)


def test_calls_come_one_or_several_wrapped_or_bare_with_ids_of_any_kind() -> None:
    one = {"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}

    for value in (
        [one],
        one,
        {"name": "now", "arguments": {"a": 1}},
        {"name": "now", "parameters": {"a": 1}},
        '{"name": "now", "arguments": "{\\"a\\": 1}"}',
        json.dumps([one]),
        [json.dumps(one)],
        [{**one, "id": ""}],
        [{**one, "id": None}],
    ):
        assert read_calls(value) == [one]
    assert read_calls([{**one, "id": "c1"}, {**one, "id": 2}]) == [
        {**one, "id": "c1"},
        {**one, "id": "2"},
    ]
    assert read_calls(None) == read_calls([]) == read_calls("") == []


@pytest.mark.parametrize(
    "calls", ["not json", "now", 7, ["now"], [{"id": "c"}], [{"function": "now"}], [{"name": ""}]]
)
def test_a_call_without_a_name_is_refused(calls: object) -> None:
    with pytest.raises(PromptRejected) as refused:
        read_calls(calls)

    assert refused.value.reason == "bad_tool_call"


def test_what_was_read_is_read_again_as_it_is() -> None:
    tools = read_tools([BARE, {"name": "sum"}])
    calls = read_calls([call('{"zone": "UTC"}', id=1), call("not json"), {"name": "sum"}])

    assert read_tools(tools) == tools
    assert read_calls(calls) == calls


def test_nulls_that_a_table_put_into_a_tool_are_absent_and_defaults_stay() -> None:
    properties = {"city": {"type": "string", "default": None, "enum": None}, "day": None}
    tool = {
        "name": "weather",
        "description": None,
        "parameters": {"type": "object", "properties": properties, "required": ["city"]},
    }

    (wrapped,) = read_tools([tool])

    assert wrapped["function"] == {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}},
            "required": ["city"],
        },
    }
