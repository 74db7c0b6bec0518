"""What holds for every row that there can be, likely or wild."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.conversations import POLICIES, turns_of
from producer.schemas import SCHEMAS, Conversation, Shape, read_conversation

texts = st.text(alphabet='ab {}[]":,\n\u2028é\U0001f600\ud83d', max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(width=32) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["now", "sum"])
calls = st.fixed_dictionaries(
    {"name": names, "arguments": st.dictionaries(texts, values, max_size=2) | texts | st.none()},
    optional={"id": names | st.integers(0, 9)},
)
told = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
likely_messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": told})
    | st.fixed_dictionaries({"from": st.sampled_from(["human", "system"]), "value": texts})
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["assistant", "gpt"])},
        optional={
            "content": told | st.none(),
            "tool_calls": st.lists(calls, max_size=2),
            "function_call": calls,
            "reasoning_content": texts,
        },
    )
    | st.fixed_dictionaries(
        {"from": st.just("function_call"), "value": calls | calls.map(json.dumps)}
    )
    | st.fixed_dictionaries(
        {"role": st.just("tool"), "content": values},
        optional={"name": names, "tool_call_id": names},
    ),
    min_size=1,
    max_size=6,
)
likely_fields: dict[str, st.SearchStrategy[Any]] = {
    "messages": likely_messages,
    "conversations": likely_messages | likely_messages.map(json.dumps),
    "user_turns": st.lists(texts, max_size=3),
    "instruction": texts,
    "input": texts,
    "output": texts | st.integers(),
    "prompt": texts,
    "tools": st.lists(st.fixed_dictionaries({"name": names}), max_size=2),
    "sampling": st.fixed_dictionaries(
        {}, optional={"top_p": st.floats(0, 1), "max_tokens": values}
    ),
    "system": texts,
    "custom_id": names,
    "body": st.fixed_dictionaries({"messages": likely_messages}, optional={"top_k": values}),
}
other_fields = {name: likely_fields[name] for name in ("tools", "sampling", "system", "prompt")}
wild_fields = {name: values for name in [*likely_fields, "turns", "text", "image", "functions"]}
rows = (
    st.fixed_dictionaries({"messages": likely_messages}, optional=other_fields)
    | st.fixed_dictionaries({}, optional=likely_fields)
    | st.fixed_dictionaries({}, optional=wild_fields)
)
shapes = st.builds(
    Shape,
    schema=st.sampled_from(["", *SCHEMAS[:-1]]),
    fields=st.sampled_from([{}, {"messages": "topic"}, {"prompt": "id", "id": "prompt"}]),
    system=st.sampled_from(["", "Be brief."]),
) | st.builds(Shape, template=st.sampled_from(["{prompt}", "{id}: {text}"]))


def outcome_of(row: Json, shape: Shape) -> Conversation | str:
    try:
        return read_conversation(row, shape)
    except PromptRejected as error:
        return str(error)


@given(rows, shapes)
def test_every_row_is_read_or_refused_and_every_turn_asks_something(
    row: Json, shape: Shape
) -> None:
    before = copy.deepcopy(row)

    conversation = outcome_of(row, shape)

    assert repr(row) == repr(before)
    if isinstance(conversation, str):
        return
    assert orjson.dumps([conversation.messages, conversation.tools, conversation.rest])
    for policy in POLICIES:
        try:
            turns = turns_of(conversation.messages, policy)
        except PromptRejected:
            continue
        assert turns
        for turn in turns:
            asked = [m["content"] for m in turn.messages if m["role"] == "user"]
            assert asked
            assert all(text.strip() for text in asked)


@given(rows, shapes)
def test_the_order_of_its_keys_changes_nothing_of_a_rows_outcome(row: Json, shape: Shape) -> None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, list):
            return [reversed_keys(item) for item in value]
        if isinstance(value, dict):
            return {key: reversed_keys(item) for key, item in reversed(value.items())}
        return value

    assert repr_of(outcome_of(row, shape)) == repr_of(outcome_of(reversed_keys(row), shape))


def repr_of(outcome: Conversation | str) -> str:
    """Equal for equal outcomes, NaN included, whatever the order of keys."""
    return str(orjson.dumps(outcome, option=orjson.OPT_SORT_KEYS))


@given(rows)
def test_what_was_normalised_is_read_again_as_it_is(row: Json) -> None:
    once = outcome_of(row, Shape())

    if isinstance(once, Conversation):
        twice = read_conversation({"messages": once.messages, "tools": once.tools}, Shape())
        assert (twice.messages, twice.tools) == (once.messages, once.tools)
