"""How the caller's Shape changes what is read of a row."""

from __future__ import annotations

import pytest

from dflash_workers.contract.errors import BadInput, PromptRejected
from dflash_workers.contract.records import Json
from producer.schemas import Shape, read_conversation

DETECT = Shape()
SYSTEM = {"role": "system", "content": "Be brief."}
A, B = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
ANSWER = {"role": "assistant", "content": "A"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "A"}


def reason_of(row: Json, shape: Shape = DETECT) -> str:
    with pytest.raises(PromptRejected) as refused:
        read_conversation(row, shape)
    return refused.value.reason


def test_a_named_schema_is_read_even_where_another_fits() -> None:
    row = {"messages": [A], "conversations": [HUMAN, GPT], "prompt": "b"}

    assert read_conversation(row, DETECT).schema == "messages"
    assert read_conversation(row, Shape(schema="sharegpt")).messages == [A, ANSWER]
    assert read_conversation(row, Shape(schema="prompt")).messages == [B]
    assert reason_of(row, Shape(schema="alpaca")) == "no_messages"


def test_a_named_schema_needs_no_more_than_its_conversation() -> None:
    body = {"body": {"messages": [A]}}

    assert read_conversation({"instruction": "a"}, Shape(schema="alpaca")).messages == [A]
    assert read_conversation(body, Shape(schema="openai_batch")).messages == [A]
    assert reason_of(body) == "no_messages"


def test_fields_are_renamed_before_anything_is_read() -> None:
    swapped = Shape(fields={"instruction": "output", "output": "instruction"})
    dialog = Shape(fields={"messages": "dialog", "system": "persona"})

    read = read_conversation({"dialog": [A], "persona": "Be brief.", "id": 1}, dialog)

    assert (read.messages, read.rest) == ([SYSTEM, A], {"id": 1})
    assert read_conversation({"messages": [B]}, dialog).messages == [B]
    assert read_conversation({"messages": [B], "dialog": [A]}, dialog).messages == [A]
    assert read_conversation({"output": "a", "instruction": "A"}, swapped).messages == [A, ANSWER]


def test_a_template_makes_the_prompt_of_a_rows_own_fields() -> None:
    shape = Shape(template="Q{{1}}: {question}\nLevel {level}, {the tags}.")
    row = {"id": 3, "question": "why?", "level": 2, "the tags": {"b": 1, "a": None}}

    read = read_conversation(row, shape)

    assert read.messages[0]["content"] == 'Q{1}: why?\nLevel 2, {"a":null,"b":1}.'
    assert (read.schema, read.rest) == ("prompt", row)


def test_a_template_is_filled_where_alpaca_would_fit_but_not_where_messages_do() -> None:
    shape = Shape(template="{instruction}: {input}")

    alpaca = read_conversation({"instruction": "Add", "input": "", "output": "0"}, shape)
    messages = read_conversation({"instruction": "Add", "messages": [A]}, shape)

    assert alpaca.messages == [{"role": "user", "content": "Add: "}]
    assert messages.messages == [A]


@pytest.mark.parametrize("row", [{"id": 1}, {"question": None}])
def test_a_row_without_a_field_of_the_template_is_refused(row: Json) -> None:
    assert reason_of(row, Shape(template="{question}")) == "template_field"


@pytest.mark.parametrize(
    "template",
    [
        "{",
        "}",
        "{}",
        "{question!r}",
        "{question:>8}",
        "{question.upper}",
        "{question[0]}",
        "{question:{width}}",
        "no field",
    ],
)
def test_a_template_that_can_not_be_filled_is_refused_at_once(template: str) -> None:
    with pytest.raises(BadInput, match="template"):
        Shape(template=template)


def test_a_shape_that_contradicts_itself_is_refused_at_once() -> None:
    with pytest.raises(BadInput, match="unknown schema"):
        Shape(schema="openai")
    with pytest.raises(BadInput, match="plain prompts"):
        Shape(schema="alpaca", template="{instruction}")


def test_the_callers_system_prompt_is_for_conversations_that_have_none() -> None:
    shape = Shape(system="Be kind.")
    kind = {"role": "system", "content": "Be kind."}

    assert read_conversation({"prompt": "a"}, shape).messages == [kind, A]
    assert read_conversation({"prompt": "a", "system": "Be brief."}, shape).messages == [SYSTEM, A]
    assert read_conversation({"messages": [SYSTEM, A]}, shape).messages == [SYSTEM, A]
    assert read_conversation({"messages": [A, ANSWER, SYSTEM, B]}, shape).messages[0] == A


def test_a_recorded_system_message_stands_before_the_rows_field() -> None:
    read = read_conversation({"messages": [SYSTEM, A], "system": "Be loud."}, DETECT)

    assert (read.messages, read.rest) == ([SYSTEM, A], {"system": "Be loud."})
