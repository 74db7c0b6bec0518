"""A row, whatever shape people keep prompts in -> a Conversation in the one normal form.

Called by candidates.py for each row that comes out of sources/; conversations.py makes turns of the
messages. The shape is detected row by row, in the order of SCHEMAS, unless the caller names it: no
row is read by what other rows look like. A field that is null or empty is as good as absent, and
the same row gives the same Conversation whatever the order of its keys. What is not read is kept in
`rest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from reprlib import Repr
from string import Formatter
from typing import Any

from dflash_workers.contract.errors import BadInput, PromptRejected
from dflash_workers.contract.records import Json
from producer.json_values import checked_row, parse_text, sorted_text
from producer.messages import normal_messages, text_of
from producer.overrides import NAMES as SAMPLING_FIELDS
from producer.overrides import read_overrides
from producer.tools import read_tools

PROMPT_FIELDS = ("prompt", "question", "instruction", "query", "text")
SYSTEM_FIELDS = ("system", "system_prompt")
# A row with any of these not empty asks for more than a text model can see.
MODALITY_FIELDS = frozenset({"image", "images", "audio", "audios", "video", "videos"})
_OPTIONAL_FIELDS = MODALITY_FIELDS.union(SYSTEM_FIELDS, ("tools", "functions", "sampling"))

# Takes a row's conversation out of it; None or [] where the row is not of this schema.
_Taker = Callable[[Json, "Shape"], list[Any] | None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are to be read. Raises BadInput for what can't mean anything."""

    schema: str = ""  # one of SCHEMAS; empty: detected per row
    fields: Mapping[str, str] = field(default_factory=dict)  # our field name -> the row's
    template: str = ""  # for plain prompts, over the row's fields: "Question: {question}"
    system: str = ""  # system prompt of conversations that have none

    def __post_init__(self) -> None:
        if self.schema and self.schema not in SCHEMAS:
            raise BadInput(f"unknown schema {self.schema!r}: choose one of {', '.join(SCHEMAS)}")
        if self.template and self.schema not in ("", "prompt"):
            raise BadInput(f"a template is for plain prompts, not for schema {self.schema!r}")
        if self.template:
            _template_pieces(self.template)


@dataclass(slots=True)
class Conversation:
    """A row as everything after this file sees it. Not frozen, which would cost 2 us a row."""

    schema: str  # which of SCHEMAS it was
    messages: list[Json]  # in the normal form that messages.py describes
    tools: list[Json]  # wrapped: {"type": "function", "function": {...}}
    sampling: Json  # overrides of the run's; see OVERRIDABLE
    rest: Json  # everything else of the row: id, heldout, metadata...


def read_conversation(row: Json, shape: Shape) -> Conversation:
    """The row's conversation. Leaves the row as it is. Raises PromptRejected."""
    return conversation_of(checked_row(row), shape)


def conversation_of(row: Json, shape: Shape) -> Conversation:
    """The same, of a row that JSON can surely hold."""
    rest = row.copy()
    if shape.fields:
        rest = _renamed(rest, shape.fields)
    schema, recorded = "messages", rest.get("messages")
    if recorded and isinstance(recorded, list) and not shape.schema:  # most rows, of a million
        del rest["messages"]
    else:
        schema, recorded = _recorded_messages(rest, shape)
    messages = normal_messages(recorded)
    if not shape.system and _OPTIONAL_FIELDS.isdisjoint(rest):
        return Conversation(schema, messages, [], {}, rest)
    if not MODALITY_FIELDS.isdisjoint(rest):
        _refuse_modalities(rest)
    _add_system(messages, rest, shape.system)
    tools = rest.pop("tools", None) or rest.pop("functions", None)
    sampling = rest.pop("sampling", None)
    return Conversation(
        schema,
        messages,
        read_tools(tools) if tools else [],
        read_overrides(sampling) if sampling else {},
        rest,
    )


def _renamed(row: Json, fields: Mapping[str, str]) -> Json:
    """The row with its fields under our names."""
    present = {ours: theirs for ours, theirs in fields.items() if theirs in row}
    renamed = {name: value for name, value in row.items() if name not in present.values()}
    return renamed | {ours: row[theirs] for ours, theirs in present.items()}


def _refuse_modalities(row: Json) -> None:
    for name in sorted(MODALITY_FIELDS):
        if row.get(name):
            raise PromptRejected("unsupported_modality", f"`{name}` is not empty")


def _recorded_messages(rest: Json, shape: Shape) -> tuple[str, list[Any]]:
    """The name of the row's schema, and its messages, taken out of it."""
    for schema, take in _takers(shape):
        messages = take(rest, shape)
        if messages:
            return schema, messages
    wanted = f"no {shape.schema} conversation" if shape.schema else "no conversation"
    kinds = {name: type(value).__name__ for name, value in rest.items()}
    raise PromptRejected("no_messages", f"{wanted} in a row with {_DETAIL.repr(kinds)}")


def _takers(shape: Shape) -> tuple[tuple[str, _Taker], ...]:
    """The schemas to try, in order."""
    if shape.schema:
        return tuple(taker for taker in _TAKERS if taker[0] == shape.schema)
    if shape.template:  # says itself what the prompt is, so an instruction is not Alpaca's
        return tuple(taker for taker in _TAKERS if taker[0] != "alpaca")
    return _TAKERS


_DETAIL = Repr()
_DETAIL.maxdict = 20  # keys of a row, in order


def _take_openai_batch(rest: Json, shape: Shape) -> list[Any] | None:
    """A request of OpenAI's batch API. What else its body says stays in `rest["body"]`."""
    if not rest.get("body") or not (rest.get("custom_id") or shape.schema):
        return None
    body = _parsed(rest["body"], dict)
    if not isinstance(body, dict):
        return None
    body = body.copy()
    messages = _take_list(body, "messages") or _take_text(body, ("prompt",))
    if not messages:
        return None
    if not rest.get("tools"):
        rest["tools"] = body.pop("tools", None) or body.pop("functions", None)
    if not rest.get("sampling"):
        rest["sampling"] = {name: body.pop(name) for name in SAMPLING_FIELDS if name in body}
    rest["body"] = body
    return messages


def _take_messages(rest: Json, shape: Shape) -> list[Any] | None:
    return _take_list(rest, "messages")


def _take_sharegpt(rest: Json, shape: Shape) -> list[Any] | None:
    return _take_list(rest, "conversations") or _take_list(rest, "conversation")


def _take_user_turns(rest: Json, shape: Shape) -> list[Any] | None:
    """Questions without answers. `turns` has other meanings too, but not where all is text."""
    texts = _take_list(rest, "user_turns")
    if not texts and rest.get("turns"):
        turns = _parsed(rest["turns"], list)
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            return None
        texts = turns
        del rest["turns"]
    if not texts:
        return None
    messages = [message for text in texts for message in (_user(text), {"role": "assistant"})]
    return messages[:-1]


def _take_alpaca(rest: Json, shape: Shape) -> list[Any] | None:
    instruction = rest.get("instruction")
    if not isinstance(instruction, str) or not instruction:
        return None
    if "input" not in rest and "output" not in rest and not shape.schema:
        return None
    del rest["instruction"]
    given, output = _as_text(rest.pop("input", None)), _as_text(rest.pop("output", None))
    messages = [_user(f"{instruction}\n\n{given}" if given else instruction)]
    return [*messages, {"role": "assistant", "content": output}] if output else messages


def _take_prompt(rest: Json, shape: Shape) -> list[Any] | None:
    if shape.template:
        return [_user(_filled(shape.template, rest))]
    return _take_text(rest, PROMPT_FIELDS)


def _take_text(rest: Json, names: tuple[str, ...]) -> list[Any] | None:
    """The first of the fields that holds text, or a list of messages."""
    for name in names:
        value = rest.get(name)
        if isinstance(value, str) and value:
            del rest[name]
            return [_user(value)]
        if isinstance(value, list) and value and _is_message(value[0]):
            del rest[name]
            return value
    return None


def _take_list(rest: Json, name: str) -> list[Any] | None:
    value = rest.get(name)
    if not value:
        return None
    if not isinstance(value, list):
        value = _parsed(value, list)
    if not value or not isinstance(value, list):
        return None
    del rest[name]
    return value


def _parsed(value: object, kind: type) -> object:
    """The value; where it is text, what it stands for as JSON, if that is of this kind."""
    if not isinstance(value, str) or not value:
        return value
    try:
        parsed = parse_text(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, kind) else value


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item)


def _user(content: object) -> Json:
    return {"role": "user", "content": content}


def _add_system(messages: list[Json], rest: Json, default: str) -> None:
    """Put the row's system prompt, or else the caller's, before messages that have none."""
    name = next((name for name in SYSTEM_FIELDS if rest.get(name)), "")
    if not name and not default:
        return
    if any(message["role"] == "system" for message in messages):
        return
    text = text_of(rest.pop(name)) if name else default
    messages.insert(0, {"role": "system", "content": text})


def _filled(template: str, row: Json) -> str:
    """The template's text over a row, which keeps its fields: they may be its id or its answer."""
    texts = []
    for literal, name in _template_pieces(template):
        texts.append(literal)
        if name:
            value = row.get(name)
            if value is None:
                raise PromptRejected("template_field", f"the template asks for {name!r}")
            texts.append(_as_text(value))
    return "".join(texts)


def _as_text(value: object) -> str:
    """A field's text, also where a table made numbers of it; none for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else sorted_text(value)


@lru_cache(16)
def _template_pieces(template: str) -> list[tuple[str, str]]:
    """(literal text, name of the field after it or ""). Raises BadInput."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise BadInput(f"template {template!r}: {error}") from error
    for _, name, form, conversion in parsed:
        if name is not None and (not name or set(name) & set(".[]") or form or conversion):
            raise BadInput(f"template {template!r}: only plain {{names}} of fields can be used")
    if not any(name for _, name, _, _ in parsed):
        raise BadInput(f"template {template!r}: names no field, so all prompts would be the same")
    return [(literal, name or "") for literal, name, _, _ in parsed]


_TAKERS: tuple[tuple[str, _Taker], ...] = (
    ("messages", _take_messages),
    ("openai_batch", _take_openai_batch),
    ("sharegpt", _take_sharegpt),
    ("user_turns", _take_user_turns),
    ("alpaca", _take_alpaca),
    ("prompt", _take_prompt),
)
SCHEMAS = tuple(schema for schema, _ in _TAKERS)
