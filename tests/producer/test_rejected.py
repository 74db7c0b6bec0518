from __future__ import annotations

import orjson
import pytest

from dflash_workers.contract.records import Json, Refusal, Turn
from producer.conversations import turns_of
from producer.rejected import export, read_rejected, refused_rows, rejections
from producer.schemas import Shape, read_conversation
from tests.producer.campaign import Campaign, prompts

REFUSALS = (
    Refusal("rows.jsonl:8", "no_messages", "neither", '{"id": 8}'),
    Refusal("rows.jsonl:9", "bad_tools", "no name", '{"id": 9}'),
)


def exported(campaign: Campaign, *reasons: str) -> list[Json]:
    lines = list(export(campaign.store, campaign.run, frozenset(reasons)))
    assert all(line.endswith(b"\n") for line in lines)
    return [orjson.loads(line) for line in lines]


def test_counts_follow_a_prompt_to_its_highest_generation(campaign: Campaign) -> None:
    (first,) = campaign.plan(prompts("a", "b", "c", "d"), refusals=REFUSALS)
    campaign.commit(first, {"a": "context_length", "b": "context_length", "c": "poison"})
    before = rejections(campaign.store, campaign.run)
    (again,) = campaign.plan(prompts("a", "b", generation=1))
    waiting = rejections(campaign.store, campaign.run)
    campaign.commit(again, {"b": "poison"})

    after = rejections(campaign.store, campaign.run)

    assert before[0] == {"no_messages": 1, "bad_tools": 1}
    assert [before[1], waiting[1], after[1]] == [
        {"context_length": 2, "poison": 1},
        {"poison": 1},
        {"poison": 2},
    ]


def test_rejected_prompts_are_found_with_their_batch_by_reason(campaign: Campaign) -> None:
    first, second = campaign.plan(prompts("a", "b"), prompts("c", "d"))
    campaign.commit(first, {"b": "poison"})
    campaign.commit(second, {"c": "context_length", "d": "poison"})

    found = list(read_rejected(campaign.store, campaign.run, frozenset({"poison"})))

    assert [item.batch.batch for item in found] == [first.batch, second.batch]
    assert [p.id for item in found for p in item.prompts(campaign.store)] == ["b", "d"]


def test_the_export_says_why_and_can_be_chosen_by_reason(campaign: Campaign) -> None:
    (message,) = campaign.plan(
        prompts("a", "b", heldout=True, metadata={"topic": "maths"}), refusals=REFUSALS
    )
    campaign.commit(message, {"a": "context_length", "b": "poison"})

    rows = exported(campaign)

    assert [row["reason"] for row in rows] == ["context_length", "poison"]
    assert [r.reason for r in refused_rows(campaign.store, campaign.run)] == [
        *("no_messages", "bad_tools")
    ]
    assert rows[0] == {
        "id": "a",
        "reason": "context_length",
        "detail": "why",
        "generation": 0,
        "messages": [{"role": "user", "content": "question a"}],
        "heldout": True,
        "topic": "maths",
    }
    assert exported(campaign, "poison", "bad_tools") == rows[1:]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


ASKED = [
    {"name": "weather", "arguments": {"city": "Rome"}, "content": "sunny"},
    {"name": "weather", "arguments": {}, "content": "rain"},
]
TURNS = {
    "rollout": [
        Turn([{"role": "system", "content": "Be brief."}, user("one")]),
        Turn([user("two")], ASKED),
        Turn([user("three"), user("and four")]),
        Turn([user("five")], ASKED[:1]),
    ],
    "strip": [Turn([{"role": "system", "content": "Be brief."}, user("one"), user("two")])],
    "last": [Turn([user("one"), {"role": "assistant", "content": "1"}, user("two")])],
    "first": [Turn([user("one")])],
}


@pytest.mark.parametrize("policy", TURNS)
def test_an_exported_row_is_planned_as_the_same_prompt_again(
    campaign: Campaign, policy: str
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    planned = prompts("a", turns=TURNS[policy], tools=tools, sampling={"temperature": 0.5})
    (message,) = campaign.plan(planned)
    campaign.commit(message, {"a": "poison"})

    (row,) = exported(campaign)
    conversation = read_conversation(row, Shape())

    assert turns_of(conversation.messages, policy) == TURNS[policy]
    assert conversation.rest["id"] == "a"
    assert conversation.sampling == {"temperature": 0.5}
    assert [tool["function"]["name"] for tool in conversation.tools] == ["weather"]
