"""A conversation's messages -> the turns that the target answers, by the run's multi-turn policy.

Called by candidates.py with the normal messages that schemas.py read; the turns become a Prompt,
which the workers' rollout.py answers turn by turn. `finished_conversation` is the same for those
that were answered elsewhere and are only imported. Every turn has a user's message, and what is
shown to the target of the record is what a chat template can show.
"""

from __future__ import annotations

from reprlib import repr as short

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json, Turn
from producer.tools import check_renderable

# rollout: each question in turn, with the target's own answers to the others as its history
# strip:   all questions at once, answered once
# last:    the last question, with the recorded conversation as its history
# first:   the first question alone
POLICIES = ("rollout", "strip", "last", "first")
FINISHED = "finished"  # an import's policy: one turn that holds the recorded answers too

_Calls = list[tuple[str, Json]]  # (id, name and arguments) of calls that have no result yet


def turns_of(messages: list[Json], policy: str) -> list[Turn]:
    """At least one turn. `policy` is one of POLICIES, or FINISHED. Raises PromptRejected."""
    if policy == FINISHED:
        return [Turn(finished_conversation(messages))]
    if len(messages) == 1 and messages[0]["role"] == "user":  # the same by every policy
        _check_text(messages[0]["content"])
        return [Turn(messages)]
    _check_has_user(messages)
    return _BY_POLICY[policy](messages)


def finished_conversation(messages: list[Json]) -> list[Json]:
    """The messages as a chat template takes them. Raises PromptRejected, e.g. `unfinished`."""
    _check_has_user(messages)
    last = messages[-1]
    if last["role"] != "assistant" or not (last.get("content") or last.get("tool_calls")):
        raise PromptRejected("unfinished", "the last message is no recorded answer")
    return _history(messages)


def _rollout(messages: list[Json]) -> list[Turn]:
    turns: list[Turn] = []
    question: list[Json] = []  # messages that no answer followed yet
    is_asked = False
    calls: _Calls = []
    for message in messages:
        role = message["role"]
        if role == "user":
            _check_text(message["content"])
            question.append(message)
            is_asked = True
        elif role == "assistant":
            if is_asked:
                turns.append(Turn(question))
                question, is_asked = [], False
            calls = _calls_of(message)
        elif role == "tool":
            call = _take_call(calls, message)
            if turns:  # else it goes with the leading assistant that called
                turns[-1].tool_results.append({**call, "content": message["content"]})
        else:
            question.append(message)
    if is_asked:
        turns.append(Turn(question))
    return turns


def _strip(messages: list[Json]) -> list[Turn]:
    question = [message for message in messages if message["role"] in ("system", "user")]
    for message in question:
        if message["role"] == "user":
            _check_text(message["content"])
    return [Turn(question)]


def _last(messages: list[Json]) -> list[Turn]:
    end = max(i for i, message in enumerate(messages) if message["role"] == "user") + 1
    return [Turn(_history(messages[:end]))]


def _first(messages: list[Json]) -> list[Turn]:
    """What comes after the second question was asked, no longer matters, even if it is wrong."""
    is_asked = is_answered = False
    for end, message in enumerate(messages):
        if message["role"] == "user":
            if is_answered:
                return _rollout(messages[:end])
            is_asked = True
        elif message["role"] == "assistant":
            is_answered = is_asked
    return _rollout(messages)


_BY_POLICY = {"rollout": _rollout, "strip": _strip, "last": _last, "first": _first}


def _history(messages: list[Json]) -> list[Json]:
    """Recorded messages, all of which a template can show, without leading answers."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    before = [message for message in messages[:first] if message["role"] == "system"]
    calls: _Calls = []
    for message in messages[first:]:
        role = message["role"]
        if role == "user":
            _check_text(message["content"])
        elif role == "assistant":
            if "content" not in message:
                raise PromptRejected("no_recorded_answer", "an answer in between is missing")
            check_renderable(message.get("tool_calls", []))
            calls = _calls_of(message)
        elif role == "tool":
            _take_call(calls, message)
    return before + messages[first:]


def _calls_of(message: Json) -> _Calls:
    return [(call.get("id", ""), call["function"]) for call in message.get("tool_calls", ())]


def _take_call(calls: _Calls, result: Json) -> Json:
    """The call that a result answers, by its id, else by order: a name, and what is known of it."""
    call_id, call = result.get("tool_call_id"), {"name": result.get("name", "")}
    if calls:
        by_id = (i for i, (known_id, _) in enumerate(calls) if call_id and known_id == call_id)
        _, call = calls.pop(next(by_id, 0))
    if not call["name"]:
        raise PromptRejected("bad_tool_call", "a tool result that answers no call")
    return call


def _check_has_user(messages: list[Json]) -> None:
    roles = sorted({message["role"] for message in messages})
    if "user" not in roles:
        reason = "leading_assistant" if roles == ["assistant"] else "no_user_turn"
        raise PromptRejected(reason, f"no user message among {len(messages)}: {short(roles)}")


def _check_text(text: str) -> None:
    if not text or text.isspace():
        raise PromptRejected("empty_content", "a user message has no text")
