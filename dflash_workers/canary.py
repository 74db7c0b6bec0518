"""Is the engine behind the URL the run's model? Asked at each start of an engine, before any work.

The run's first engine writes `canary.json`, the log-probabilities of a fixed text, and every later
one must agree: /model_info shows only a path, and other weights, another quantisation or another
revision would go unseen into the data. How an answer ends and whether thinking can be switched are
tried as well. Called by worker and by bench. What can't be told is a warning and never an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from dflash_workers.contract.answers import THINK_END, THINK_START
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, Conflict, Missing, PromptRejected
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import SCHEMA_VERSION, Json, RunSpec
from dflash_workers.contract.store import Store
from dflash_workers.engine import Engine
from dflash_workers.quality import STOP
from dflash_workers.questions import STOP_ID_APPENDED, Generation, Question

NUM_IDS = 64
# Prose, numbers, speech and code: what a quantised or another model finds more or less likely.
TEXT = """\
The ferry to the island leaves at 7:45 every morning, except on Sundays. Maria counted 128 steps \
from the harbour to the old lighthouse, and wrote in her notebook: "Wind from the north, 14 knots; \
visibility good." Later she computed the mean of five readings:

def mean(values):
    return sum(values) / len(values)

print(mean([3, 1, 4, 1, 5]))  # 2.8

Water boils at 100 degrees Celsius at sea level, but at lower temperatures in the mountains.
"""
_QUESTION: list[Json] = [{"role": "user", "content": "How many legs have three spiders?"}]
_NUM_TRIED = 8  # ids of an answer
_NUM_THOUGHT = 48  # enough for a marker, which comes first
_TAIL = 8  # ids of a prompt that may open the thinking


@dataclass(frozen=True, slots=True)
class Canary:
    """`canary.json`: what every engine of the run must reproduce."""

    schema: int
    ids: list[int]
    log_probs: list[float]  # of each id but the first
    stop_id: str  # included | appended | unknown
    engine: Json  # as it reported itself
    made_at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two engines of one model may differ, in nats.

    The mean decides: a single unlikely id may be off by much in bfloat16. Measured over this text
    with SmolLM2-135M, mean and largest difference: one engine twice 0 and 0; SGLang and
    transformers in float32 0.0000 and 0.0000; bfloat16 against float32 0.03 to 0.04 and 0.18 to
    0.22; weights in fp8 0.16 and 0.83, in int4 0.79 and 4.0; one of 210 matrices with a tenth of
    noise 0.03 to 0.14 and 0.13 to 0.80. int8 by rows, 0.07 and 0.36, passes between bfloat16
    engines: it is as near as two kernels are.
    """

    mean: float
    largest: float


FLOAT32 = Tolerance(mean=0.01, largest=0.1)  # where both engines say so
ROUNDED = Tolerance(mean=0.1, largest=0.7)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of an engine that may work."""

    is_first: bool  # its log-probabilities are the run's from now on
    mean_difference: float | None  # nats, from the run's first engine; None: not compared
    largest_difference: float | None
    stop_id: str  # included | appended | unknown
    warnings: list[str] = field(default_factory=list)


async def check_engine(
    engine: Engine, spec: RunSpec, chat: Chat, store: Store, *, may_be_first: bool = True
) -> Verdict:
    """Of an engine that was looked at. `may_be_first`: it becomes what others are held against,
    where there is none yet. Raises BadInput for one that must not work for this run;
    EngineUnavailable.
    """
    standing = await asyncio.to_thread(_standing, store, spec.run)
    ids = standing.ids if standing else canary_ids(chat)
    try:
        stop_id, thinking_warnings, log_probs = await _together(
            _stop_id(engine, spec, chat),
            _thinking_warnings(engine, spec, chat),
            engine.log_probs(ids),
        )
    except PromptRejected as error:
        raise BadInput(
            f"{engine.url}: this engine refuses how run {spec.run!r} samples: {error.detail}"
        ) from error
    warnings = _context_warnings(engine.facts, spec) + thinking_warnings
    if log_probs is None:
        warnings.append("it tells no log-probabilities of a prompt: its weights are not checked")
        return Verdict(False, None, None, stop_id, warnings)
    if standing is None and not may_be_first:
        warnings.append("no worker has begun the run: nothing tells whether this is its model")
        return Verdict(False, None, None, stop_id, warnings)
    mine = Canary(SCHEMA_VERSION, ids, log_probs, stop_id, engine.facts, time.time())
    first = standing if standing else await asyncio.to_thread(_put, store, spec.run, mine)
    mean, largest = _compare(first, mine, engine, spec)
    return Verdict(first is mine, mean, largest, stop_id, warnings)


async def _together(*questions: Coroutine[Any, Any, Any]) -> list[Any]:
    """All answers, for an engine takes as long for one as for several; or the first error."""
    asked = [asyncio.ensure_future(question) for question in questions]
    try:
        return await asyncio.gather(*asked)
    finally:
        for question in asked:
            question.cancel()


def canary_ids(chat: Chat) -> list[int]:
    """The fixed text's first ids, in the target's vocabulary."""
    return list(chat.tokenizer.encode(TEXT, add_special_tokens=False))[:NUM_IDS]


def _standing(store: Store, run: str) -> Canary | None:
    try:
        return load(Canary, store.get(RunKeys(run).canary))
    except Missing:
        return None


def _put(store: Store, run: str, mine: Canary) -> Canary:
    """Mine, or another's that was quicker."""
    try:
        store.put_new(RunKeys(run).canary, dump(mine))
    except Conflict:
        return load(Canary, store.get(RunKeys(run).canary))
    return mine


def _compare(first: Canary, mine: Canary, engine: Engine, spec: RunSpec) -> tuple[float, float]:
    """Mean and largest difference. Raises BadInput where they are another model's."""
    if first.ids != mine.ids:  # two first engines, of two versions of this program
        raise BadInput(f"run {spec.run!r}: its canary is of another text: start this worker again")
    differences = [abs(a - b) for a, b in zip(first.log_probs, mine.log_probs, strict=True)]
    mean, largest = statistics.fmean(differences), max(differences)
    dtypes = {first.engine.get("dtype"), mine.engine.get("dtype")}
    tolerance = FLOAT32 if dtypes == {"float32"} else ROUNDED
    if mean <= tolerance.mean and largest <= tolerance.largest:
        return mean, largest
    others = [
        f"{name} {first.engine.get(name)!r} there, {mine.engine.get(name)!r} here"
        for name in sorted({*first.engine, *mine.engine})
        if first.engine.get(name) != mine.engine.get(name)
    ]
    raise BadInput(
        f"{engine.url}: this engine is not {spec.target.name} as run {spec.run!r} knows it: its "
        f"log-probabilities of a fixed text differ by {mean:.3f} on average (allowed "
        f"{tolerance.mean}) and {largest:.2f} at most ({tolerance.largest}) from the run's first "
        f"engine's; {'; '.join(others) or 'their flags are the same'}: check its weights"
    )


def _context_warnings(facts: Json, spec: RunSpec) -> list[str]:
    length = facts.get("context_length")
    if not isinstance(length, int) or length >= spec.target.context_len:
        return []
    return [
        f"its context is {length} ids, the run plans for {spec.target.context_len}: it will "
        "refuse, for ever, prompts that others could answer"
    ]


async def _stop_id(engine: Engine, spec: RunSpec, chat: Chat) -> str:
    """Whether the id that stops an answer is in it: a greedy answer, stopped at its first id."""
    greedy = await _ask(engine, spec, chat, _NUM_TRIED)
    if not greedy.output_ids:
        return "unknown"
    first_id = greedy.output_ids[0]
    stopped = await _ask(engine, spec, chat, _NUM_TRIED, stop_token_ids=[first_id])
    if stopped.finish_reason != STOP or stopped.output_ids[-1:] != [first_id]:
        return "unknown"
    return "appended" if STOP_ID_APPENDED in stopped.notes else "included"


async def _thinking_warnings(engine: Engine, spec: RunSpec, chat: Chat) -> list[str]:
    if "enable_thinking" not in spec.template_kwargs:
        return []
    on, off = (
        dataclasses.replace(chat, template_kwargs=chat.template_kwargs | {"enable_thinking": value})
        for value in (True, False)
    )
    if on.prompt_ids(_QUESTION, []) == off.prompt_ids(_QUESTION, []):
        return ["the run's template renders the same with and without enable_thinking"]
    with_it, without_it = await _together(
        *(_ask(engine, spec, chat, _NUM_THOUGHT) for chat in (on, off))
    )
    warnings = []
    if not _thinks(on, with_it):
        warnings.append("with thinking on, a short answer shows no sign of it")
    if _thinks(off, without_it):
        warnings.append("with thinking off, a short answer thinks all the same")
    return warnings


def _thinks(chat: Chat, answer: Generation) -> bool:
    prompt = chat.tokenizer.decode(chat.prompt_ids(_QUESTION, [])[-_TAIL:])
    said = chat.tokenizer.decode(answer.output_ids)
    is_opened = str(prompt).rstrip().endswith(THINK_START)
    return is_opened or THINK_START in said or THINK_END in said


async def _ask(
    engine: Engine,
    spec: RunSpec,
    chat: Chat,
    num_ids: int,
    stop_token_ids: list[int] | None = None,
) -> Generation:
    """A greedy answer of a few ids, asked for as the run asks."""
    sampling = dataclasses.replace(
        spec.sampling,
        temperature=0.0,
        max_new_tokens=num_ids,
        stop_token_ids=stop_token_ids or spec.sampling.stop_token_ids,
    )
    question = Question(
        input_ids=chat.prompt_ids(_QUESTION, []),
        seed=0,
        sampling=sampling,
        vocab_size=spec.target.vocab_size,
        messages=_QUESTION,
        template_kwargs=chat.template_kwargs,
    )
    return await engine.generate(question)
