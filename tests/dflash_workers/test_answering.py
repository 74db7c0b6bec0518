"""Half an answer is never thrown away: noted at a goodbye or before a death, and gone on with."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from dflash_workers.answering import can_continue
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import Draining
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import Answer, Prompt, Row, RunSpec, Sampling
from dflash_workers.contract.settings import Settings
from dflash_workers.notes import Partial, digest_of
from tests.batches import until
from tests.desks import Holders
from tests.fake_engine import FakeEngine
from tests.planned import prompt

LONG = {"max_new_tokens": 2000}
SLOW = "step=0.05 count=1500"  # 256 letters an event: 0.3 s


@pytest.fixture
def holders(engine: FakeEngine, chat: Chat, spec: RunSpec, hints: Hints) -> Holders:
    return Holders(engine.url, chat, spec, hints)


@pytest.fixture
def unbroken(holders: Holders) -> Callable[[Prompt], Answer]:
    """What one holder alone would have made of a prompt."""
    alone = dataclasses.replace(holders, batch="unbroken")

    def make(asked: Prompt) -> Answer:
        return alone.roll(asked).answers[0]

    return make


def asked_ids(holders: Holders, asked: Prompt) -> list[int]:
    return holders.chat.prompt_ids(asked.turns[0].messages, [])


def note(holders: Holders, asked: Prompt, output_ids: list[int], num_asked: int = 1) -> None:
    digest = digest_of(asked_ids(holders, asked))
    journal = holders.journal()
    journal.put(
        asked.key, Partial(digest, 0, 7, output_ids, [len(output_ids)], num_asked, latency_s=1.5)
    )
    journal.flush()


def noted(holders: Holders, asked: Prompt) -> Partial:
    ids = asked_ids(holders, asked)
    found = asyncio.run(holders.journal().find(asked.key, 0, ids))
    assert isinstance(found, Partial)
    return found


def rows(fates: list[Row | BaseException]) -> list[Row]:
    assert all(isinstance(fate, Row) for fate in fates), fates
    return [fate for fate in fates if isinstance(fate, Row)]


def test_what_was_sampled_before_a_goodbye_is_gone_on_with(
    holders: Holders, engine: FakeEngine, unbroken: Callable[[Prompt], Answer]
) -> None:
    asked = prompt(SLOW, sampling=LONG)
    whole = unbroken(asked)
    engine.requests.clear()

    began = time.monotonic()
    (fate,) = holders.roll_all([asked], lambda: time.monotonic() > began + 0.15)
    half = noted(holders, asked).output_ids
    row = holders.roll(asked)

    assert isinstance(fate, Draining)
    assert 0 < len(half) < 1500
    first, second = engine.requests
    assert second["input_ids"] == first["input_ids"] + half
    assert second["sampling_params"]["max_new_tokens"] == 2000 - len(half)
    assert second["sampling_params"]["sampling_seed"] == row.answers[0].seed == whole.seed
    assert row.answers[0].output_ids == whole.output_ids
    assert row.answers[0].segments == [len(half), len(whole.output_ids) - len(half)]
    assert row.answers[0].input_ids == whole.input_ids == first["input_ids"]
    assert (row.answers[0].content, row.flags) == (whole.content, [])
    assert holders.counts == {"continued": 1, "continued_tokens": len(half)}


def test_an_answer_may_be_gone_on_with_again_and_again(
    holders: Holders, unbroken: Callable[[Prompt], Answer]
) -> None:
    asked = prompt(SLOW, sampling=LONG)
    whole = unbroken(asked)

    for _ in range(3):
        began = time.monotonic()
        holders.roll_all([asked], lambda began=began: time.monotonic() > began + 0.08)  # type: ignore[misc]
    pieces = noted(holders, asked).segments
    row = holders.roll(asked)

    assert len(pieces) > 1
    assert row.answers[0].output_ids == whole.output_ids
    assert row.answers[0].segments == [*pieces, len(whole.output_ids) - sum(pieces)]


def test_48_answers_are_noted_within_a_second_of_the_goodbye(
    holders: Holders, engine: FakeEngine
) -> None:
    holders.max_in_flight = 48
    longer = {"max_new_tokens": 3500}
    prompts = [prompt(f"{i} step=0.2 count=3000", sampling=longer) for i in range(48)]
    said_at: list[float] = []

    def all_run() -> bool:
        if engine.running == 48 and not said_at:
            said_at.append(time.monotonic() + 0.5)  # every first event has come
        return bool(said_at) and time.monotonic() > said_at[0]

    fates = holders.roll_all(prompts, all_run)
    took_s = time.monotonic() - said_at[0]

    assert all(isinstance(fate, Draining) for fate in fates)
    assert took_s < 1
    assert all(len(noted(holders, asked).output_ids) > 0 for asked in prompts)


def test_a_leaving_holder_starts_nothing_new(holders: Holders, engine: FakeEngine) -> None:
    holders.max_in_flight = 1
    prompts = [prompt(f"{i} hang") for i in range(5)]

    fates = holders.roll_all(prompts, lambda: engine.running == 1)

    assert all(isinstance(fate, Draining) for fate in fates)
    assert len(engine.requests) == 1


def test_turns_that_ended_before_a_goodbye_stay_ended(holders: Holders, engine: FakeEngine) -> None:
    asked = prompt("say:one", SLOW, sampling=LONG)

    holders.roll_all([asked], lambda: engine.running > 0 and SLOW in engine.asked)
    row = holders.roll(asked)

    assert engine.asked.count("say:one") == 1
    assert [a.turn for a in row.answers] == [0, 1]
    assert len(row.answers[1].output_ids) == 1501


@pytest.mark.parametrize(("num_ids", "reason"), [(64, "length"), (9, "stop")])
def test_a_partial_that_has_ended_needs_no_engine(
    holders: Holders, engine: FakeEngine, num_ids: int, reason: str
) -> None:
    asked = prompt("count=200")
    letters = holders.chat.tokenizer.encode("abcdefgh" * 8, add_special_tokens=False)[:num_ids]
    stop_id = holders.spec.sampling.stop_token_ids[0]
    ids = letters if reason == "length" else [*letters[:-1], stop_id]
    ids = ids + [ids[0]] * (num_ids - len(ids))
    note(holders, asked, ids)

    row = holders.roll(asked)

    assert engine.requests == []
    assert (row.answers[0].output_ids, row.answers[0].finish_reason) == (ids, reason)
    assert row.answers[0].latency_s == 1.5


def test_a_partial_of_another_question_is_ignored(holders: Holders, engine: FakeEngine) -> None:
    asked = prompt("say:one")
    other = dataclasses.replace(prompt("say:another"), key=asked.key)
    note(holders, other, [5, 6, 7])

    row = holders.roll(asked)

    assert row.answers[0].content == "one"
    assert engine.requests[0]["input_ids"] == asked_ids(holders, asked)
    assert holders.counts == {}


def test_an_engine_that_takes_no_ids_makes_the_answer_again_and_it_is_counted(
    holders: Holders, unbroken: Callable[[Prompt], Answer]
) -> None:
    asked = prompt("count=40")
    whole = unbroken(asked)
    note(holders, asked, whole.output_ids[:10])
    holders.dialect = "openai"

    row = holders.roll(asked)

    assert row.answers[0].output_ids == whole.output_ids
    assert row.answers[0].segments == [41]
    assert holders.counts == {"made_again_tokens": 10}


@dataclasses.dataclass(frozen=True, slots=True)
class Penalised(Sampling):
    frequency_penalty: float = 0.0


def test_only_what_cant_see_the_cut_is_gone_on_with(spec: RunSpec) -> None:
    known = dataclasses.asdict(spec.sampling)

    assert can_continue(spec.sampling)
    assert can_continue(Penalised(**known))
    assert not can_continue(Penalised(**known, frequency_penalty=0.5))


VANISHING = """
import sys
from dflash_workers.contract.chat import load_tokenizer, Chat
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.settings import Settings
from tests.desks import Holders
from tests.planned import prompt

url, model_dir, redis_url, redis_prefix, spec, message = sys.argv[1:]
spec = load(RunSpec, spec.encode())
chat = Chat(load_tokenizer(model_dir), spec.chat_template, {}, spec.control_tokens)
hints = open_hints(Settings(redis_url=redis_url, redis_prefix=redis_prefix))
holders = Holders(url, chat, spec, hints, note_every=100)
holders.roll(prompt("say:one", message, sampling={"max_new_tokens": 2000}))
"""


@pytest.mark.slow
def test_a_holder_killed_in_the_middle_loses_what_came_after_its_last_note(
    holders: Holders,
    engine: FakeEngine,
    unbroken: Callable[[Prompt], Answer],
    redis_settings: Settings,
    model_dir: Path,
) -> None:
    asked = prompt("say:one", "step=0.1 count=1500", sampling=LONG)
    arguments = [engine.url, model_dir, redis_settings.redis_url, redis_settings.redis_prefix]
    told = [*arguments, dump(holders.spec).decode(), "step=0.1 count=1500"]

    victim = subprocess.Popen([sys.executable, "-c", VANISHING, *map(str, told)])
    until(lambda: engine.asked.count("step=0.1 count=1500") == 1)
    time.sleep(0.45)
    victim.kill()
    victim.wait()
    row = holders.roll(asked)

    first, second = row.answers[1].segments
    assert first >= 100 and first + second == 1501
    assert engine.asked.count("say:one") == 1
    assert engine.requests[-1]["input_ids"][-first:] == row.answers[1].output_ids[:first]
    assert holders.counts == {"continued": 1, "continued_tokens": first}
    alone = dataclasses.replace(holders, batch="unbroken")
    assert row.answers[1].output_ids == alone.roll(asked).answers[1].output_ids


def num_writes(client: redis.Redis) -> int:
    """Of any journal, so far."""
    commands = client.info("commandstats")
    return int(commands.get("cmdstat_evalsha", {"calls": 0})["calls"])


def test_notes_are_taken_while_an_answer_comes_only_where_asked_for(
    holders: Holders, redis_client: redis.Redis, hints: Hints
) -> None:
    asked = prompt("count=500 step=0.02", sampling={"max_new_tokens": 512})
    num_notes = []
    for note_every in (0, 100):
        holders.note_every, holders.batch = note_every, f"noting{note_every}"
        before = num_writes(redis_client)
        holders.roll(asked)
        num_notes.append(num_writes(redis_client) - before)

    assert num_notes[0] == 1  # the finished turn
    assert 3 <= num_notes[1] <= 6
    key = hints.keys.journal(holders.spec.run, "0/noting100")
    assert redis_client.hkeys(key) == [f"{asked.key}:0".encode()]


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        (" again and", "repetition"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "repetition"),
    ],
)
def test_a_loop_is_stopped_long_before_its_limit(
    holders: Holders, engine: FakeEngine, said: str, flag: str
) -> None:
    row = holders.roll(prompt(f"long step=0.02 say:{said}", sampling={"max_new_tokens": 3000}))

    answer = row.answers[0]
    assert answer.finish_reason == "abort"
    assert flag in answer.flags
    assert len(answer.output_ids) <= 1024
    assert engine.aborted == [engine.requests[0]["rid"]]


def test_a_stopped_loop_is_a_finished_answer(holders: Holders, engine: FakeEngine) -> None:
    asked = prompt("long step=0.02 say: again and", sampling={"max_new_tokens": 3000})

    first, second = holders.roll(asked), holders.roll(asked)

    assert second.answers[0].output_ids == first.answers[0].output_ids
    assert second.answers[0].flags == first.answers[0].flags
    assert len(engine.requests) == 1


LOOP = " again and" * 8


def test_a_flagged_answer_is_asked_once_more_with_another_seed(
    holders: Holders, engine: FakeEngine
) -> None:
    holders.spec = dataclasses.replace(holders.spec, quality={"repetition": "retry-once"})

    row = holders.roll(prompt(f"say:{LOOP}||fine"))

    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert len(set(seeds)) == 2
    assert (row.answers[0].content, row.answers[0].seed) == ("fine", seeds[1])
    assert row.flags == []
    assert holders.counts["asked_again"] == 1
    assert holders.counts["made_again_tokens"] > 0


def test_an_answer_that_is_no_better_is_kept(holders: Holders, engine: FakeEngine) -> None:
    holders.spec = dataclasses.replace(holders.spec, quality={"repetition": "retry-once"})

    row = holders.roll(prompt(f"say:{LOOP}"))

    assert len(engine.requests) == 2
    assert row.flags == ["repetition"]


def test_who_takes_over_between_two_askings_asks_the_second(
    holders: Holders, engine: FakeEngine
) -> None:
    holders.spec = dataclasses.replace(holders.spec, quality={"repetition": "retry-once"})
    asked = prompt(f"say:{LOOP}")
    note(holders, asked, [], num_asked=2)

    row = holders.roll(asked)

    assert [r["sampling_params"]["sampling_seed"] for r in engine.requests] == [7]
    assert row.flags == ["repetition"]


def test_a_goodbye_in_the_second_asking_is_gone_on_with_there(
    holders: Holders, engine: FakeEngine
) -> None:
    holders.spec = dataclasses.replace(holders.spec, quality={"repetition": "retry-once"})
    asked = prompt(f"step=0.1 say:{LOOP}||count=1200", sampling=LONG)
    began: list[float] = []

    def second_runs() -> bool:
        if len(engine.requests) == 2 and not began:
            began.append(time.monotonic() + 0.15)
        return bool(began) and time.monotonic() > began[0]

    (fate,) = holders.roll_all([asked], second_runs)
    half = noted(holders, asked)
    row = holders.roll(asked)

    assert isinstance(fate, Draining)
    assert half.num_asked == 2 and half.output_ids
    assert row.answers[0].segments == [len(half.output_ids), 1201 - len(half.output_ids)]
    assert row.flags == []
    assert len(engine.requests) == 3
