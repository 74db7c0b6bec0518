"""One prompt -> its answers, turn by turn: the target answers on its own history.

Called by generate for each prompt of a batch; asks engine, notes each turn in journal the moment it
ends, hands a Row back. A turn that is noted already, for the very same ids, is not asked again.
Recorded tool results join only where the target calls a tool of that name; a call without one ends
the conversation there, kept and flagged. Every turn keeps the ids that it was asked with.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from dataclasses import dataclass

from dflash_workers.contract.chat import Chat, ParsedAnswer, parse_answer
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.flags import CONTEXT_FULL, TOOL_RESULT_MISSING, TOOL_ROUNDS
from dflash_workers.contract.records import Answer, Json, Prompt, Row, RunSpec, Turn
from dflash_workers.engine import Engine
from dflash_workers.journal import Journal
from dflash_workers.quality import flags_of

MAX_TOOL_ROUNDS = 4  # per turn; more is a loop
_THINK = "<think>"
_THINK_TAIL = 16  # ids at a prompt's end that may spell the start of thinking


@dataclass(frozen=True, slots=True)
class Desk:
    """What one batch's prompts are answered with."""

    spec: RunSpec
    chat: Chat
    engine: Engine
    journal: Journal


async def roll_out(prompt: Prompt, desk: Desk) -> Row:
    """The whole conversation. Raises PromptRejected, EngineUnavailable."""
    history: list[Json] = []
    answers: list[Answer] = []
    ending = ""
    for turn in prompt.turns:
        history += turn.messages
        ending = await _answer_turn(prompt, turn, history, answers, desk)
        if ending:
            break
    while history[-1]["role"] != "assistant":  # asked, but no longer answered
        history.pop()
    flags = {flag for answer in answers for flag in answer.flags} | ({ending} - {""})
    return Row(
        key=prompt.key,
        id=prompt.id,
        generation=prompt.generation,
        heldout=prompt.heldout,
        source=prompt.source,
        messages=history,
        tools=prompt.tools,
        answers=answers,
        flags=sorted(flags),
        metadata=prompt.metadata,
    )


async def _answer_turn(
    prompt: Prompt, turn: Turn, history: list[Json], answers: list[Answer], desk: Desk
) -> str:
    """Extend history and answers; return the flag that ends the conversation here, or ""."""
    recorded = list(turn.tool_results)
    for num_rounds in itertools.count():
        ids = desk.chat.prompt_ids(history, prompt.tools)
        room = desk.spec.target.context_len - len(ids)
        if room < desk.spec.sampling.max_new_tokens:
            if answers:
                return CONTEXT_FULL
            raise PromptRejected("context_length", f"{len(ids)} ids leave room for {room}")
        answer = await _answer(prompt.key, len(answers), ids, desk)
        answers.append(answer)
        history.append(
            ParsedAnswer(answer.content, answer.reasoning_content, answer.tool_calls).as_message()
        )
        if not answer.tool_calls:
            break
        if num_rounds == MAX_TOOL_ROUNDS:
            return TOOL_ROUNDS
        results = _take_results(answer.tool_calls, recorded)
        if results is None:
            return TOOL_RESULT_MISSING
        history += results
    return ""


def _take_results(calls: list[Json], recorded: list[Json]) -> list[Json] | None:
    """A tool message per call, taken out of `recorded`; None where a call has none."""
    results: list[Json] = []
    for call in calls:
        name = call["function"]["name"]
        result = next((r for r in recorded if r["name"] == name), None)
        if result is None:
            return None
        recorded.remove(result)
        results.append({"role": "tool", "name": name, "content": result["content"]})
    return results


async def _answer(prompt_key: str, turn: int, ids: list[int], desk: Desk) -> Answer:
    noted = desk.journal.known(prompt_key, turn)
    if noted and noted.input_ids == ids:
        return _with_text(noted, desk.chat)
    async with desk.engine.slot:
        # Once more before it starts: a holder that lost the batch may have noted it since.
        noted = await asyncio.to_thread(desk.journal.find, prompt_key, turn)
        if noted and noted.input_ids == ids:
            return _with_text(noted, desk.chat)
        answer = await _ask(prompt_key, turn, ids, desk)
    stands = await asyncio.to_thread(desk.journal.keep, prompt_key, answer)
    return _with_text(stands, desk.chat) if stands.input_ids == ids else answer


async def _ask(prompt_key: str, turn: int, ids: list[int], desk: Desk) -> Answer:
    seed = _seed(prompt_key, turn)
    generation = await desk.engine.generate(ids, seed, desk.spec)
    facts = Answer(
        turn=turn,
        input_ids=ids,
        output_ids=generation.output_ids,
        segments=[len(generation.output_ids)],
        content="",
        reasoning_content="",
        tool_calls=[],
        finish_reason=generation.finish_reason,
        cached_tokens=generation.cached_tokens,
        latency_s=round(generation.latency_s, 4),
        seed=seed,
        spec=generation.spec,
    )
    parsed, is_thinking = _parse(facts, desk.chat)
    flags = flags_of(facts.output_ids, facts.finish_reason, parsed, is_thinking=is_thinking)
    return dataclasses.replace(_with_text(facts, desk.chat), flags=flags)


def _with_text(answer: Answer, chat: Chat) -> Answer:
    parsed, _ = _parse(answer, chat)
    return dataclasses.replace(
        answer,
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=parsed.tool_calls,
    )


def _parse(answer: Answer, chat: Chat) -> tuple[ParsedAnswer, bool]:
    """The answer's parts, and whether its thinking never ended."""
    text = chat.text(answer.output_ids)
    is_opened = chat.text(answer.input_ids[-_THINK_TAIL:]).rstrip().endswith(_THINK)
    has_thought = is_opened or text.lstrip().startswith(_THINK)
    return parse_answer(text, is_opened), has_thought and "</think>" not in text


def _seed(prompt_key: str, turn: int) -> int:
    """The same for every attempt, so that two attempts differ as little as they can."""
    digest = hashlib.sha256(f"{prompt_key}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
