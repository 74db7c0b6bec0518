"""What crosses a process boundary: the records kept in S3 and sent through Redis.

Read by all three packages, imports nothing of theirs and nothing but the standard library.
Records are frozen and carry facts only (ids, counts, text), never tensors or handles. `decode` is
the one door from JSON to a record: an unknown or missing field is `Corrupt`, so that a writer and
a reader of different versions never half-understand each other. A change of meaning or of a field
raises SCHEMA_VERSION.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dflash_workers.contract.errors import Corrupt

SCHEMA_VERSION = 2

Json = dict[str, Any]

# What of a run's Sampling a row or a retry may set otherwise, within bounds that producer/ checks.
OVERRIDABLE = ("temperature", "top_p", "top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples; every value explicit, because `/generate` knows no chat defaults."""

    temperature: float
    top_p: float
    top_k: int  # -1: no limit
    max_new_tokens: int  # per turn
    stop_token_ids: list[int]

    def overridden(self, overrides: Json) -> Sampling:
        """This, with the values that a prompt or a retry asks for; see OVERRIDABLE."""
        return dataclasses.replace(self, **overrides) if overrides else self


@dataclass(frozen=True, slots=True)
class Target:
    """The model whose outputs are the data, by content and not by path."""

    name: str  # for people
    config_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    weights_sha256: str  # over index, file sizes and safetensors headers, not over the weights
    vocab_size: int
    context_len: int  # tokens
    dtype: str

    def fingerprint(self) -> str:
        """64 hex digits that two targets share only if their outputs may be mixed."""
        facts = {k: v for k, v in dataclasses.asdict(self).items() if k != "name"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """`run.json`: what may not change while a run lives."""

    schema: int
    run: str
    target: Target
    chat_template: str  # the Jinja text itself: every worker renders the same
    template_kwargs: Json  # e.g. {"enable_thinking": true}
    sampling: Sampling
    multi_turn: str  # rollout | strip | last | first: see producer/conversations.py
    control_tokens: str  # escape | reject | keep: what becomes of the target's inside a text
    thinking_end_id: int = -1  # the tokenizer's id of "</think>"; -1: it has none
    quality: Json = field(default_factory=dict)  # flag -> policy: see flags.py; others are kept


@dataclass(frozen=True, slots=True)
class Turn:
    """One question to the target: `messages` join the history, then the target answers.

    `tool_results` are recorded answers (`name`, `content`, `arguments` of the call that they
    answered) that may be spliced in when the target calls a tool of that name in this turn.
    """

    messages: list[Json]
    tool_results: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One planned prompt: a line of a batch in `plan/prompts/`."""

    key: str  # 32 hex digits: hash of the user's id, or of the content where there is none
    id: str
    turns: list[Turn]
    tools: list[Json]
    heldout: bool  # never trained on
    source: str  # "path:line"
    generation: int = 0  # raised by each retry
    sampling: Json = field(default_factory=dict)  # overrides of the run's; see OVERRIDABLE
    metadata: Json = field(default_factory=dict)

    def completed(self, messages: list[Json], answers: list[Answer], flags: list[str]) -> Row:
        """Its row, with all that a prompt hands on to it."""
        return Row(
            key=self.key,
            id=self.id,
            generation=self.generation,
            heldout=self.heldout,
            source=self.source,
            messages=messages,
            tools=self.tools,
            answers=answers,
            flags=flags,
            sampling=self.sampling,
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """An input row that was not planned, and why."""

    source: str
    reason: str
    detail: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch as the plan's log lists it. The three lists run in step, one entry per prompt."""

    batch: str
    prompt_keys: list[str]
    content_digests: list[str]  # 32 hex digits: tells "planned already" from "other content"
    line_digests: list[str]  # of the input line and the call's options; "": came as no line
    offset: int  # bytes into the segment's prompts object, where the batch's zstd frame begins
    num_bytes: int  # of that frame
    generation: int = 0
    sampling: Json = field(default_factory=dict)  # a retry's overrides, in every prompt as well


@dataclass(frozen=True, slots=True)
class Segment:
    """`plan/log/<n>.json`: what one planning step added. Append-only.

    Rows are counted from the first new one on, so that a call that goes on where another was
    killed writes the segment which that one would have written.
    """

    schema: int
    number: int
    batches: list[PlannedBatch]
    sources: list[str]
    num_rows: int  # first samples + refused + duplicates + not drawn
    num_refused: int
    num_duplicates: int
    sealed: bool  # no new prompt is planned from here on; a retry's segments behind it say so too
    num_not_drawn: int = 0  # left out by their source's weight
    num_resampled: int = 0  # planned prompts that are a row's second sample or a later one
    prompts: str = ""  # key of the object with the batches' prompts; empty: no batches
    refusals: str = ""  # key of the object with the refused rows; empty: none
    priority: int = 6  # of its batches' hints: see celeryconfig.py
    road: str = "ids"  # "text": finished conversations, imported; never sent to workers
    options: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """`control/<n>.json`: what somebody ordered for a run. Append-only; the last one holds."""

    schema: int
    number: int
    action: str  # pause | resume | cancel; nothing follows a cancel
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """A hint in the queue: this batch may want work. Never the only record of a batch."""

    run: str
    segment: int
    batch: str
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn: what the engine was given and what it sampled, as ids, and as text."""

    turn: int
    input_ids: list[int]
    output_ids: list[int]  # stop id included when finish_reason is "stop"
    segments: list[int]  # lengths of the pieces that output_ids was generated in
    content: str
    reasoning_content: str
    tool_calls: list[Json]
    finish_reason: str  # stop | length | stop_string | abort: a loop, stopped here
    cached_tokens: int
    latency_s: float
    seed: int
    spec: Json = field(default_factory=dict)  # the engine's speculation statistics
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """A completed prompt: a line of `data/<segment>/<batch>/<attempt>.jsonl.zst`."""

    key: str
    id: str
    generation: int
    heldout: bool
    source: str
    messages: list[Json]  # the whole conversation as it came to be
    tools: list[Json]
    answers: list[Answer]
    flags: list[str] = field(default_factory=list)
    sampling: Json = field(default_factory=dict)  # what its prompt overrode; see OVERRIDABLE
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A planned prompt that can't be answered."""

    key: str
    id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Commit:
    """`commits/<segment>/<batch>.json`: written once, ends a batch, names the winning data."""

    schema: int
    run: str
    segment: int
    batch: str
    attempt: str  # UUIDv7 of the holder that won
    data_key: str
    sha256: str  # of the stored (compressed) bytes
    data_bytes: int
    num_rows: int
    rejected: list[Rejection]
    input_tokens: int
    output_tokens: int
    started_at: float  # seconds since the epoch
    finished_at: float
    worker: str
    engine: Json  # version and flags as the server reports them
    road: str = "ids"  # "text": imported, its rows have messages and no answers
    notes: Json = field(default_factory=dict)  # counts of what was unusual, by name


Record = TypeVar("Record")


def decode(record: type[Record], value: object) -> Record:
    """JSON value -> record. Raises Corrupt on an unknown, missing or ill-typed field."""
    return typing.cast(Record, _decode(record, value, record.__name__))


def encode(record: Any) -> Json:
    """Record -> plain JSON types."""
    return dataclasses.asdict(record)


def _decode(kind: Any, value: object, where: str) -> object:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_record(typing.cast("type[Any]", kind), value, where)
    origin = typing.get_origin(kind)
    if origin is list:
        _expect(isinstance(value, list), where, "a list", value)
        (item,) = typing.get_args(kind)
        items = typing.cast("list[object]", value)
        if item in (int, str):  # ids by the thousand: one pass, no call per item
            _expect(set(map(type, items)) <= {item}, where, f"a list of {item.__name__}", value)
            return items
        return [_decode(item, x, f"{where}[{i}]") for i, x in enumerate(items)]
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not types.NoneType]
        return None if value is None else _decode(inner[0], value, where)
    if kind is float:
        _expect(type(value) in (int, float), where, "a number", value)
        return float(typing.cast(float, value))
    _expect(type(value) is kind, where, kind.__name__, value)
    return value


def _decode_record(record: type[Any], value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise Corrupt(f"{where}: expected an object, found {type(value).__name__}")
    kinds = _field_kinds(record)
    unknown = sorted(set(value) - set(kinds))
    if unknown:
        raise Corrupt(f"{where}: unknown field {unknown[0]!r}")
    missing = sorted(
        f.name
        for f in dataclasses.fields(record)
        if f.name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    )
    if missing:
        raise Corrupt(f"{where}: missing field {missing[0]!r}")
    return record(**{k: _decode(kinds[k], v, f"{where}.{k}") for k, v in value.items()})


_KINDS: dict[type[Any], dict[str, Any]] = {}


def _field_kinds(record: type[Any]) -> dict[str, Any]:
    if record not in _KINDS:
        _KINDS[record] = typing.get_type_hints(record)
    return _KINDS[record]


def _expect(holds: bool, where: str, wanted: str, value: object) -> None:
    if not holds:
        raise Corrupt(f"{where}: expected {wanted}, found {type(value).__name__}")
