"""One turn's answer: from the journal, gone on with where another left it, or asked for.

Called by rollout for each turn; asks engine, leaves notes in journal, hands an Answer back. What
was sampled is never thrown away: a partial answer is prompted with as it is, and its pieces are
joined. Greedy, the whole is what one run would have given, as far as the engine's numbers repeat.
Sampled, it is a draw from the target as good as any: the same as one run's where the engine draws
by seed and position in the sequence (SGLang with deterministic inference), another elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from dflash_workers.contract.errors import Draining
from dflash_workers.contract.records import Answer, Json, RunSpec, Sampling
from dflash_workers.engine import Engine
from dflash_workers.journal import Journal
from dflash_workers.listening import Listener, Noting
from dflash_workers.notes import Partial, digest_of, extended
from dflash_workers.quality import LENGTH, STOP, flags_of, is_retry_due
from dflash_workers.questions import ABORT, Generation, Growth, Leaving, Question
from dflash_workers.reading import Reader
from dflash_workers.seats import Seats

# With these, what comes next depends on the ids before it, whichever of them were sampled. Any
# other (a penalty, a grammar, a stop string) could see the cut, so the answer is made again then.
_CONTINUABLE = {"temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids"}


MAX_TOOL_ROUNDS = 4  # per turn; more is a loop


@dataclass(frozen=True, slots=True)
class Desk:
    """What one batch's prompts are answered with."""

    spec: RunSpec
    reader: Reader
    engine: Engine
    journal: Journal
    leaving: Leaving = field(default_factory=Leaving)  # set: stop, note, Draining
    seats: Seats = field(default_factory=Seats)
    on_turn: Callable[[], Awaitable[None]] | None = None  # called once a turn is noted
    max_tool_rounds: int = MAX_TOOL_ROUNDS
    note_every: int = 0  # ids between two notes of an answer that is still coming; 0: none
    growth: Growth = field(default_factory=Growth)
    counts: Counter[str] = field(default_factory=Counter)  # of what was unusual, for Commit.notes


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of a prompt, as the target is asked."""

    prompt_key: str
    turn: int
    messages: list[Json]
    tools: list[Json]
    input_ids: list[int]  # the messages, rendered
    sampling: Sampling  # the run's, with what this prompt asks for


async def answer(asked: Asked, desk: Desk) -> Answer:
    """The answer that stands. Raises Draining, with all that is there noted; PromptRejected and
    EngineUnavailable, as the engine does.
    """
    place = asked.prompt_key, asked.turn, asked.input_ids
    if known := desk.journal.known(*place):
        return _with_text(known, asked, desk)
    async with desk.seats.take(asked.prompt_key, desk.engine.slots):
        if desk.leaving.is_set():
            raise Draining("this worker is leaving: not started")
        # Once more before it starts: a holder that lost the batch may have noted it since.
        found = await desk.journal.find(*place)
        if isinstance(found, Answer):
            return _with_text(found, asked, desk)
        made = await _make(asked, found, desk)
    stands = await _keep(asked, made, desk)
    return made if stands.output_ids == made.output_ids else _with_text(stands, asked, desk)


async def _keep(asked: Asked, made: Answer, desk: Desk) -> Answer:
    desk.growth.note()
    stands = await desk.journal.keep(asked.prompt_key, made)
    if desk.on_turn is not None:
        await desk.on_turn()
    return stands


def can_continue(sampling: Sampling) -> bool:
    """Whether an answer sampled so may be gone on with from ids."""
    return all(
        option.name in _CONTINUABLE or getattr(sampling, option.name) == option.default
        for option in dataclasses.fields(sampling)
    )


async def _make(asked: Asked, found: Partial | None, desk: Desk) -> Answer:
    """The answer, asked a second time where the run's policy has it so."""
    begun = found or _begin(asked, 1)
    if begun.output_ids and not (desk.engine.takes_ids and can_continue(asked.sampling)):
        desk.counts["made_again_tokens"] += len(begun.output_ids)
        begun = _begin(asked, begun.num_asked)
    made = await _finish(asked, begun, desk)
    if begun.num_asked > 1 or not is_retry_due(made.flags, desk.spec.quality):
        return made
    desk.counts.update(asked_again=1, made_again_tokens=len(made.output_ids))
    again = _begin(asked, 2)
    desk.journal.put(asked.prompt_key, again)  # so that nobody asks for the first one once more
    await desk.journal.exchange()
    return await _finish(asked, again, desk)


def _begin(asked: Asked, num_asked: int) -> Partial:
    digest = digest_of(asked.input_ids)
    return Partial(digest, asked.turn, _seed(asked, num_asked), [], [], num_asked)


async def _finish(asked: Asked, begun: Partial, desk: Desk) -> Answer:
    """The whole answer, of which `begun` is there already."""
    if begun.output_ids:
        desk.counts.update(continued=1, continued_tokens=len(begun.output_ids))
    if reason := _ending(begun, asked):
        return _judged(asked, begun, Generation([], reason, 0, 0.0, {}), "", desk)
    rest = asked.sampling.max_new_tokens - len(begun.output_ids)
    question = Question(
        input_ids=asked.input_ids + begun.output_ids,
        seed=begun.seed,
        sampling=asked.sampling.overridden({"max_new_tokens": rest} if begun.output_ids else {}),
        vocab_size=desk.spec.target.vocab_size,
        messages=asked.messages,
        tools=asked.tools,
        template_kwargs=desk.spec.template_kwargs,
        growth=desk.growth,
    )
    noting = Noting(desk.journal, asked.prompt_key, desk.note_every)
    listener = Listener(begun, noting, asked.sampling.max_new_tokens, desk.reader.call_id)
    piece = await desk.engine.generate(
        question,
        leaving=desk.leaving,
        heard=listener.hear if listener.every else None,
        hear_every=listener.every,
    )
    whole = extended(begun, piece.output_ids, piece.latency_s)
    if piece.finish_reason == ABORT and not listener.loop:
        piece = replace(piece, finish_reason=_ending(whole, asked))
        if not piece.finish_reason:
            await _leave(asked, whole, desk)
    return _judged(asked, whole, piece, listener.loop, desk)


async def _leave(asked: Asked, partial: Partial, desk: Desk) -> NoReturn:
    """Note what is there. Of many that leave at once, the first to write takes all along."""
    if partial.output_ids:
        desk.journal.put(asked.prompt_key, partial)
        await desk.journal.exchange()
    raise Draining(f"this worker is leaving: {len(partial.output_ids)} tokens noted")


def _ending(partial: Partial, asked: Asked) -> str:
    """How the ids end by themselves; "" where they don't."""
    ids, sampling = partial.output_ids, asked.sampling
    if ids and ids[-1] in sampling.stop_token_ids:
        return STOP
    return LENGTH if len(ids) >= sampling.max_new_tokens else ""


def _judged(asked: Asked, whole: Partial, piece: Generation, loop: str, desk: Desk) -> Answer:
    """The answer with its text and its flags. `piece`: the last one, which ended it."""
    sampled = _without_stop_id(whole.output_ids, asked.sampling)
    shown = piece.shown if len(whole.segments) == 1 else None
    text = shown.text if shown and shown.num_ids == len(sampled) else None
    reading = desk.reader.read(asked.input_ids, sampled, asked.tools, text)
    flags = flags_of(sampled, piece.finish_reason, reading, desk.reader.call_id)
    unusual = [flag for flag in (loop, *piece.notes) if flag and flag not in flags]
    return Answer(
        turn=asked.turn,
        input_ids=asked.input_ids,
        output_ids=whole.output_ids,
        segments=whole.segments,
        content=reading.parsed.content,
        reasoning_content=reading.parsed.reasoning_content,
        tool_calls=_with_call_ids(reading.parsed.tool_calls, asked.turn),
        finish_reason=piece.finish_reason,
        cached_tokens=min(piece.cached_tokens, len(asked.input_ids)),
        latency_s=round(whole.latency_s, 4),
        seed=whole.seed,
        spec=piece.spec,
        flags=flags + unusual,
    )


def _with_text(noted: Answer, asked: Asked, desk: Desk) -> Answer:
    sampled = _without_stop_id(noted.output_ids, asked.sampling)
    parsed = desk.reader.read(asked.input_ids, sampled, asked.tools).parsed
    return replace(
        noted,
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=_with_call_ids(parsed.tool_calls, noted.turn),
    )


def _with_call_ids(calls: list[Json], turn: int) -> list[Json]:
    """Those that a chat server would give them; nine letters, as Mistral's want."""
    return [{"id": f"call{turn:03d}{number:02d}", **call} for number, call in enumerate(calls)]


def _without_stop_id(ids: list[int], sampling: Sampling) -> list[int]:
    return ids[:-1] if ids and ids[-1] in sampling.stop_token_ids else ids


def _seed(asked: Asked, num_asked: int) -> int:
    """The same for every attempt, so that two attempts differ as little as they can."""
    name = f"{asked.prompt_key}:{asked.turn}" + (f":{num_asked}" if num_asked > 1 else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
