"""What an engine replied, and whether it can be believed.

Filled by a dialect (Reply), asked by engine (check) before anything is kept. A reply must agree
with itself, with what was asked and with its own text; one that doesn't is the engine's fault and
never the prompt's: EngineUnavailable. Only what no engine in order can produce counts: texts are
compared without whitespace and broken characters, in which detokenizers differ. What can be mended
is mended, and said in the notes: a stop id that was left out, ids that came as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dflash_workers.contract.errors import EngineUnavailable
from dflash_workers.contract.records import Json
from dflash_workers.quality import LENGTH, STOP
from dflash_workers.questions import (
    ABORT,
    STOP_ID_APPENDED,
    STOP_ID_UNKNOWN,
    STOP_STRING,
    TEXT_ROAD,
    Question,
    Shown,
    are_ids,
)

# What engines call the end of an answer. Tool calls end it as any other stop does.
FINISHES = {"stop": STOP, "length": LENGTH, "abort": ABORT, "tool_calls": STOP}
_MIN_PROMPT = 8  # ids: fewer may be repeated by an honest answer
_AROUND = 4  # ids shown before a difference


class Tokenizer(Protocol):
    """What is used of the run's tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """As a dialect read it, unchecked."""

    output_ids: list[int] | None  # None: text alone
    text: str | None  # None: not the whole answer's
    finish: str | None  # in the engine's words; None: it goes on
    num_input: int  # as the engine counts
    num_output: int
    matched: int | str | None = None  # what stopped it
    input_ids: list[int] | None = None  # what the engine says it was prompted with
    has_special: bool = False  # the text shows special tokens
    cached_tokens: int = 0
    spec: Json = field(default_factory=dict)  # speculation statistics
    status: int | None = None  # of an end that the engine chose itself, as an HTTP status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What of a reply is kept."""

    output_ids: list[int]  # stop id included
    finish_reason: str
    notes: tuple[str, ...]
    spec: Json
    shown: Shown | None = None  # of the ids but the one that stopped it


def check(reply: Reply, question: Question, tokenizer: Tokenizer | None) -> Checked:
    """Raises EngineUnavailable for a reply that can't be true. No tokenizer: texts are trusted."""
    finish = _finish(reply)
    _check_prompt(reply, question, tokenizer)
    sampled = _encoded(reply, tokenizer) if reply.output_ids is None else reply.output_ids
    stop_ids = _stop_ids(reply, finish, question)
    left_out = [] if sampled and sampled[-1] in stop_ids else stop_ids
    _check_ids(sampled + left_out, question)
    shown = None
    if reply.output_ids is not None:
        _check_count(reply, finish, len(sampled), bool(left_out))
        is_stop_last = bool(stop_ids) and not left_out
        shown = _check_text(reply, finish, sampled[:-1] if is_stop_last else sampled, tokenizer)
    notes, spec = [], reply.spec
    if reply.output_ids is None:
        notes.append(TEXT_ROAD)
        spec = spec | {"drift_ids": len(sampled) + len(left_out[:1]) - reply.num_output}
    if len(left_out) == 1:
        notes.append(STOP_ID_APPENDED)
        sampled = sampled + left_out
    elif left_out:
        notes.append(STOP_ID_UNKNOWN)
    return Checked(sampled, finish, tuple(notes), spec, shown)


def _finish(reply: Reply) -> str:
    finish = FINISHES.get(reply.finish or "", "")
    _expect(bool(finish), f"finish_reason is {reply.finish!r}")
    return STOP_STRING if finish == STOP and isinstance(reply.matched, str) else finish


def _stop_ids(reply: Reply, finish: str, question: Question) -> list[int]:
    """What may have stopped it; none where no id did."""
    if finish != STOP:
        return []
    if isinstance(reply.matched, int):
        return [reply.matched]
    return question.sampling.stop_token_ids


def _encoded(reply: Reply, tokenizer: Tokenizer | None) -> list[int]:
    _expect(tokenizer is not None and reply.text is not None, "it has neither ids nor their text")
    assert tokenizer is not None and reply.text is not None
    return list(tokenizer.encode(reply.text, add_special_tokens=False))


def _check_prompt(reply: Reply, question: Question, tokenizer: Tokenizer | None) -> None:
    ours, theirs = question.input_ids, reply.input_ids
    if theirs is not None and theirs != ours:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
        start = max(at if at >= 0 else min(len(ours), len(theirs)), _AROUND) - _AROUND
        shown = [_shown(ids[start : start + 2 * _AROUND], tokenizer) for ids in (ours, theirs)]
        _expect(
            False,
            f"it renders another prompt than the run's template, {len(theirs)} ids for "
            f"{len(ours)}: {shown[1]} for {shown[0]}: give the server the run's chat template",
        )
    _expect(
        reply.num_input == len(ours),
        f"it counts {reply.num_input} ids in a prompt of {len(ours)}: another chat template?",
    )


def _check_ids(ids: list[int], question: Question) -> None:
    size = question.vocab_size
    _expect(are_ids(ids, size), f"an id is not below {size}")
    prompt = question.input_ids
    _expect(
        len(prompt) < _MIN_PROMPT or ids[: len(prompt)] != prompt,
        "the output begins with the prompt",
    )


def _check_count(reply: Reply, finish: str, num_sampled: int, is_stop_left_out: bool) -> None:
    """An engine that leaves the stop id out may count it or not."""
    num_most = num_sampled + is_stop_left_out
    _expect(
        num_sampled <= reply.num_output <= num_most,
        f"it counts {reply.num_output} ids in an output of {num_sampled}",
    )
    _expect(num_most > 0 or finish == ABORT, "the output is empty")


def _check_text(
    reply: Reply, finish: str, words: list[int], tokenizer: Tokenizer | None
) -> Shown | None:
    """`words`: the ids that the text is of. Returns what they say, where that is known now."""
    if reply.text is None or tokenizer is None:
        return None
    is_whole = finish in (STOP, LENGTH)  # else the text ends before the stop string, or lags behind

    def is_text(decoded: str) -> bool:
        if decoded == reply.text:  # as nearly always
            return True
        ours, theirs = _letters(decoded), _letters(reply.text or "")
        return ours == theirs if is_whole else ours.startswith(theirs)

    shown = decoded = tokenizer.decode(words, skip_special_tokens=False)
    if not is_text(shown) and not reply.has_special:
        decoded = tokenizer.decode(words, skip_special_tokens=True)
    _expect(
        is_text(decoded),
        f"its text is not that of its ids: {reply.text[-80:]!r} for {decoded[-80:]!r}",
    )
    return Shown(len(words), shown)


def _letters(text: str) -> str:
    return "".join(text.split()).replace("\N{REPLACEMENT CHARACTER}", "")


def _shown(ids: list[int], tokenizer: Tokenizer | None) -> str:
    return repr(tokenizer.decode(ids, skip_special_tokens=False)) if tokenizer else str(ids)


def _expect(holds: bool, contradiction: str) -> None:
    if not holds:
        raise EngineUnavailable(f"the engine's reply can't be believed: {contradiction}")
