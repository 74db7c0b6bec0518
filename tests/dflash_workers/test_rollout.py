"""How a conversation comes to be: turn by turn, on the target's own history."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from dflash_workers.claims import Claim
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, Prompt, Row, RunSpec, Turn
from dflash_workers.engine import Engine, Patience
from dflash_workers.journal import Journals
from dflash_workers.rollout import MAX_TOOL_ROUNDS, Desk, roll_out
from tests.fake_engine import FakeEngine
from tests.planned import prompt

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


class Table:
    """Rolls prompts out, each time as another holder of the same batch."""

    def __init__(self, fake: FakeEngine, chat: Chat, spec: RunSpec, hints: Hints) -> None:
        self.fake, self.chat, self.spec = fake, chat, spec
        self.journals = Journals(hints.redis, hints.keys, hints.where)

    def roll(self, asked: Prompt) -> Row:
        async def once() -> Row:
            engine = Engine(self.fake.url, 4, Patience(away_s=0.2, backoff_s=0.05))
            journal = self.journals.open(Claim(BatchMessage(self.spec.run, 0, "b"), "a"))
            journal.load()
            try:
                return await roll_out(asked, Desk(self.spec, self.chat, engine, journal))
            finally:
                await engine.close()

        return asyncio.run(once())


@pytest.fixture
def table(engine: FakeEngine, chat: Chat, spec: RunSpec, hints: Hints) -> Table:
    return Table(engine, chat, spec, hints)


def with_tools(*results: dict[str, Any]) -> Prompt:
    turn = Turn([{"role": "user", "content": CALL}], list(results))
    return prompt("tools", turns=[turn], tools=[TOOL])


def test_each_turn_is_asked_on_the_targets_own_answers(table: Table, chat: Chat) -> None:
    row = table.roll(prompt("say:one", "say:two"))

    assert [m["content"] for m in row.messages] == ["say:one", "one", "say:two", "two"]
    second = chat.tokenizer.decode(row.answers[1].input_ids, skip_special_tokens=False)
    assert "assistant\none<|im_end|>" in second
    assert [a.turn for a in row.answers] == [0, 1]
    assert row.flags == []


def test_a_turn_keeps_the_very_ids_that_were_sent_and_sampled(table: Table) -> None:
    row = table.roll(prompt("say:one", "say:two"))

    sent = [request["input_ids"] for request in table.fake.requests]
    assert [a.input_ids for a in row.answers] == sent
    assert [a.segments for a in row.answers] == [[len(a.output_ids)] for a in row.answers]


def test_finished_turns_are_not_asked_again(table: Table) -> None:
    with pytest.raises(Exception, match="engine"):
        table.roll(prompt("say:one", "fail=1000"))
    asked_before = table.fake.asked.count("say:one")

    table.fake._failures["fail=1000"] = 1000
    row = table.roll(prompt("say:one", "fail=1000"))

    assert asked_before == table.fake.asked.count("say:one") == 1
    assert [a.content for a in row.answers] == ["one", "Answer to fail=1000"]


def test_a_noted_turn_that_was_asked_otherwise_does_not_count(table: Table) -> None:
    first = table.roll(prompt("say:one"))

    other = table.roll(dataclasses.replace(prompt("say:two"), key=first.key))

    assert other.answers[0].content == "two"


def test_a_recorded_result_is_spliced_in_where_its_tool_is_called(table: Table) -> None:
    row = table.roll(with_tools({"name": "weather", "content": "say:sunny"}))

    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert row.answers[-1].content == "sunny"
    assert row.flags == []


@pytest.mark.parametrize("results", [[], [{"name": "other", "content": "x"}]])
def test_a_call_without_a_recorded_result_ends_the_conversation_kept_and_flagged(
    table: Table, results: list[dict[str, Any]]
) -> None:
    row = table.roll(with_tools(*results))

    assert [m["role"] for m in row.messages] == ["user", "assistant"]
    assert row.flags == ["tool_result_missing"]


def test_a_loop_of_tool_calls_is_stopped(table: Table) -> None:
    row = table.roll(with_tools(*[{"name": "weather", "content": CALL}] * 10))

    assert len(row.answers) == MAX_TOOL_ROUNDS + 1
    assert "tool_rounds" in row.flags


def test_a_prompt_that_leaves_no_room_is_rejected_without_a_request(table: Table) -> None:
    with pytest.raises(PromptRejected) as caught:
        table.roll(prompt("x " * 4096))

    assert caught.value.reason == "context_length"
    assert table.fake.requests == []


def test_a_later_turn_that_leaves_no_room_ends_the_conversation_there(table: Table) -> None:
    row = table.roll(prompt("say:one", "x " * 4096))

    assert [m["content"] for m in row.messages] == ["say:one", "one"]
    assert row.flags == ["context_full"]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("long say:counting 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20", ["truncated"]),
        ("say:<think>well", ["empty", "unfinished_thinking"]),
        ("say:" + " again and" * 8, ["repetition"]),
        ("say:<think>well</think>done", []),
    ],
)
def test_what_is_wrong_with_an_answer_is_flagged_and_the_answer_kept(
    table: Table, message: str, flags: list[str]
) -> None:
    row = table.roll(prompt(message))

    assert [f for f in row.answers[0].flags if f != "repetition" or "again" in message] == flags


def test_two_attempts_ask_with_the_same_seed(table: Table) -> None:
    table.roll(prompt("say:one", "say:two"))

    seeds = [r["sampling_params"]["sampling_seed"] for r in table.fake.requests]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**31 for seed in seeds)
