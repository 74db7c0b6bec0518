"""A row -> the prompt that will be planned, or the reason why not.

Takes rows from <- sources.py, hands candidates to -> plan.py. The multi-turn policy is `rollout`:
recorded assistant turns are dropped, each user turn becomes a question that the target answers on
its own history, and recorded tool results stay beside the turn whose call they answered. The same
row always gives the same key and digest, whatever its file, its metadata or the order of its keys.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import orjson

from dflash_workers.contract.errors import BadInput, PromptRejected
from dflash_workers.contract.records import Json, Prompt, Refusal, Turn
from producer.sources import EXCERPT_CHARS, SourcedRow

ID_KEYS = ("id", "custom_id", "uuid")

# Roles that a row may use, and what the target's template is given.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides a row's fate beside the row."""

    control_tokens: tuple[str, ...] = ()  # of the target; text that holds one is refused
    heldout_share: float = 0.0  # 0..1, by hash of the id, unless the row says `heldout`

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_share <= 1:
            raise BadInput(f"heldout must be from 0 to 100 %, not {self.heldout_share:%}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that may be planned: its prompt as a line, and what the plan needs to know of it."""

    key: str
    content_sha256: str  # over turns and tools
    heldout: bool
    source: str
    line: bytes  # the Prompt as JSON, without "\n"

    def refused(self, reason: str, detail: str) -> Refusal:
        """This row's refusal."""
        excerpt = self.line.decode()[:EXCERPT_CHARS]
        return Refusal(self.source, reason, detail, excerpt)


def read_candidates(rows: Iterable[SourcedRow], rules: Rules) -> Iterator[Candidate | Refusal]:
    """One candidate or refusal for each row, in order."""
    control = _control_pattern(rules.control_tokens)
    for source, row in rows:
        if isinstance(row, Refusal):
            yield row
            continue
        try:
            yield _candidate(row, source, control, rules.heldout_share)
        except PromptRejected as error:
            yield Refusal(source, error.reason, error.detail, _excerpt(row))


def _candidate(
    row: Json, source: str, control: re.Pattern[bytes] | None, heldout_share: float
) -> Candidate:
    rest = dict(row)
    turns = _turns(rest)
    tools = _tools(rest.pop("tools", None))
    content = _dumped({"turns": turns, "tools": tools}, orjson.OPT_SORT_KEYS)
    if control and (match := control.search(content)):
        raise PromptRejected("control_token", f"the text holds {match[0].decode()}")
    content_sha256 = hashlib.sha256(content).hexdigest()
    prompt_id = _pop_id(rest)
    key = _sha256(prompt_id)[:32] if prompt_id else content_sha256[:32]
    heldout = rest.pop("heldout", None)
    if heldout is None:
        heldout = _is_drawn(key, heldout_share)
    elif not isinstance(heldout, bool):
        raise PromptRejected("bad_heldout", f"`heldout` must be true or false: {short(heldout)}")
    prompt = Prompt(
        key=key,
        id=prompt_id or key,
        turns=turns,
        tools=tools,
        heldout=heldout,
        source=source,
        metadata=rest,
    )
    return Candidate(key, content_sha256, heldout, source, _dumped(prompt))


def _turns(row: Json) -> list[Turn]:
    """Take a row's conversation out of it."""
    if isinstance(row.get("messages"), list) and row["messages"]:
        return _turns_of_messages(row.pop("messages"))
    if isinstance(row.get("user_turns"), list):
        return _turns_of_strings(row.pop("user_turns"), row.pop("system", None))
    raise PromptRejected("no_messages", "neither `messages` nor `user_turns` is a list")


def _turns_of_strings(texts: list[Any], system: object) -> list[Turn]:
    if not texts:
        raise PromptRejected("no_user_turn", "`user_turns` is empty")
    turns = [Turn([_user_message(text)]) for text in texts]
    if system is not None:
        turns[0].messages.insert(0, {"role": "system", "content": _text(system)})
    return turns


@dataclass(slots=True)
class _Rollout:
    """Turns as they come to be while a recorded conversation is walked."""

    turns: list[Turn] = field(default_factory=list)
    question: list[Json] = field(default_factory=list)  # messages that no answer followed yet
    calls: list[tuple[str, str]] = field(default_factory=list)  # (id, name), without a result yet

    def answered(self) -> None:
        """An answer is expected here; without a question nothing was asked."""
        if any(message["role"] == "user" for message in self.question):
            self.turns.append(Turn(self.question))
            self.question = []


def _turns_of_messages(messages: list[Any]) -> list[Turn]:
    rollout = _Rollout()
    roles = set()
    for message in messages:
        role = _role(message)
        roles.add(role)
        if role == "assistant":
            rollout.answered()
            rollout.calls = _tool_calls(message.get("tool_calls"))
        elif role == "tool":
            _add_tool_result(rollout, message)
        elif role == "user":
            rollout.question.append(_user_message(message.get("content")))
        else:
            text = _text(message.get("content"))
            rollout.question.append({"role": "system", "content": text})
    rollout.answered()
    if not rollout.turns:
        reason = "leading_assistant" if roles == {"assistant"} else "no_user_turn"
        raise PromptRejected(reason, f"no user message among {len(messages)}")
    return rollout.turns


def _role(message: object) -> str:
    if not isinstance(message, dict):
        raise PromptRejected("bad_message", f"a message must be an object: {short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptRejected("unknown_role", f"role {short(role)}")
    return ROLES[role]


def _user_message(content: object) -> Json:
    text = _text(content)
    if not text.strip():
        raise PromptRejected("empty_content", "a user message has no text")
    return {"role": "user", "content": text}


def _text(content: object) -> str:
    """A message's text; parts of it are joined as chat templates do, with nothing between."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptRejected("bad_message", f"content must be text: {short(content)}")
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise PromptRejected("unsupported_modality", f"a content part of type {short(kind)}")


def _tool_calls(calls: object) -> list[tuple[str, str]]:
    """(id, name) of each recorded call. A call that no template could render is refused."""
    if not isinstance(calls, list | None):
        raise PromptRejected("bad_tool_call", f"`tool_calls` must be a list: {short(calls)}")
    return [_tool_call(call) for call in calls or []]


def _tool_call(call: object) -> tuple[str, str]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise PromptRejected("bad_tool_call", f"a call without a name: {short(call)}")
    arguments = function.get("arguments")
    if not isinstance(_parsed(arguments, "bad_tool_call") or {}, dict):
        raise PromptRejected("bad_tool_call", f"arguments must be an object: {short(arguments)}")
    return str(call.get("id", "")), name


def _add_tool_result(rollout: _Rollout, message: Json) -> None:
    """Keep a recorded result beside the turn that led to its call."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    by_id = (i for i, call in enumerate(rollout.calls) if call_id and call[0] == call_id)
    if rollout.calls:
        _, name = rollout.calls.pop(next(by_id, 0))
    if not isinstance(name, str) or not name:
        raise PromptRejected("bad_tool_call", "a tool result that answers no call")
    if rollout.turns:  # else it goes with the leading assistant turn that called
        content = _text(message.get("content"))
        rollout.turns[-1].tool_results.append({"name": name, "content": content})


def _tools(tools: object) -> list[Json]:
    tools = _parsed(tools, "bad_tools") or []
    if not isinstance(tools, list):
        raise PromptRejected("bad_tools", f"`tools` must be a list: {short(tools)}")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> Json:
    """A tool in the wrapped form that templates expect."""
    wrapped = tool if isinstance(tool, dict) and "function" in tool else None
    function = wrapped["function"] if wrapped else tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptRejected("bad_tools", f"a tool without a name: {short(tool)}")
    return wrapped or {"type": "function", "function": function}


def _parsed(value: object, reason: str) -> object:
    """A value that may have been stored as JSON text."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise PromptRejected(reason, f"not JSON: {short(value)}") from error


def _pop_id(row: Json) -> str:
    """The first id that a row has, as text; empty where it has none."""
    for name in ID_KEYS:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(row.pop(name))
    return ""


def _is_drawn(key: str, share: float) -> bool:
    """Whether this prompt is held out: a draw that needs no other prompt."""
    return int(_sha256("heldout:" + key)[:16], 16) < share * 2**64


def _control_pattern(tokens: Iterable[str]) -> re.Pattern[bytes] | None:
    """Finds any of the tokens within a string of a JSON text."""
    # Escaped like the text itself; the longest first, so that the message names it whole.
    inside = {orjson.dumps(token)[1:-1] for token in tokens if token}
    pattern = b"|".join(re.escape(token) for token in sorted(inside, key=len, reverse=True))
    return re.compile(pattern) if pattern else None


def _dumped(value: Any, options: int = 0) -> bytes:
    try:
        return orjson.dumps(value, option=options)
    except TypeError as error:
        raise PromptRejected("malformed_json", f"too deeply nested: {error}") from error


def _excerpt(row: Json) -> str:
    try:
        return orjson.dumps(row).decode()[:EXCERPT_CHARS]
    except TypeError:
        return short(row)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
