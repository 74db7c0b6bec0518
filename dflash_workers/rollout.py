"""One prompt -> its answers, turn by turn: the target answers on its own history.

Called by generate for each prompt of a batch; answering gives each turn's answer, a Row goes back.
The history is what a chat server would send: messages read from the output and rendered again,
never ids joined to ids. Recorded tool results join only where the target calls a tool of that name;
a call without one ends the conversation there, kept and flagged. Every turn keeps the ids that it
was asked with.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from dflash_workers.answering import Asked, Desk, answer
from dflash_workers.contract.answers import ParsedAnswer
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.flags import (
    CONTEXT_FULL,
    TOOL_ARGS_DIFFER,
    TOOL_RESULT_MISSING,
    TOOL_ROUNDS,
)
from dflash_workers.contract.records import Answer, Json, Prompt, Row, Turn
from dflash_workers.quality import check_kept
from dflash_workers.tool_results import splice_results


@dataclass(slots=True)
class _Talk:
    """A conversation as it comes to be."""

    history: list[Json] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)  # of the conversation; answers have their own
    is_over: bool = False

    def end(self, flag: str) -> None:
        """No turn follows."""
        self.flags.add(flag)
        self.is_over = True


async def roll_out(prompt: Prompt, desk: Desk) -> Row:
    """The whole conversation.

    Raises PromptRejected, EngineUnavailable, and Draining with all that is there noted.
    """
    talk = _Talk()
    for turn in prompt.turns:
        talk.history += turn.messages
        await _answer_turn(prompt, turn, talk, desk)
        if talk.is_over:
            break
    check_kept(talk.flags, desk.spec.quality)
    while talk.history[-1]["role"] != "assistant":  # asked, but no longer answered
        talk.history.pop()
    flags = talk.flags.union(*(answer.flags for answer in talk.answers))
    return prompt.completed(talk.history, talk.answers, sorted(flags))


async def _answer_turn(prompt: Prompt, turn: Turn, talk: _Talk, desk: Desk) -> None:
    """Extend the talk by one turn's answers, and by what its tools gave."""
    recorded = turn.tool_results
    for num_rounds in itertools.count():
        asked = _next_question(prompt, talk, desk)
        if asked is None:
            return talk.end(CONTEXT_FULL)
        said = await answer(asked, desk)
        check_kept(said.flags, desk.spec.quality)
        talk.answers.append(said)
        parsed = ParsedAnswer(said.content, said.reasoning_content, said.tool_calls)
        talk.history.append(parsed.as_message())
        if not said.tool_calls:
            return None
        if num_rounds == desk.max_tool_rounds:
            return talk.end(TOOL_ROUNDS)
        results = splice_results(said.tool_calls, recorded)
        if results is None:
            return talk.end(TOOL_RESULT_MISSING)
        if results.args_differ:
            talk.flags.add(TOOL_ARGS_DIFFER)
        talk.history += results.messages
        recorded = results.left


def _next_question(prompt: Prompt, talk: _Talk, desk: Desk) -> Asked | None:
    """None where the context has no room left for an answer."""
    sampling = desk.spec.sampling.overridden(prompt.sampling)
    ids = desk.reader.chat.prompt_ids(talk.history, prompt.tools)
    room = desk.spec.target.context_len - len(ids)
    if room >= sampling.max_new_tokens:
        messages = list(talk.history)  # as they are now: others follow
        return Asked(prompt.key, len(talk.answers), messages, prompt.tools, ids, sampling)
    if talk.answers:
        return None
    raise PromptRejected("context_length", f"{len(ids)} ids leave room for {room}")
