"""How many requests in flight suit an engine: a sweep on the live one, with the run's own prompts.

Called by cli_bench. Speaks to the engine as a worker does (its dialect, the run's sampling, ids
rendered by the run's template) with nothing behind it: no Redis, no journal, no commits. Upwards in
steps until the rate collapses, the engine lets requests wait, or the steps are over; then between
the last good step and the collapse. The engine should have nothing else to do meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import orjson

from dflash_workers.attempt import Dialect
from dflash_workers.bench_result import BenchResult, Point, is_collapsed, lets_wait
from dflash_workers.contract.errors import EngineUnavailable, FleetError, NotEnough
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.contract.store import Store
from dflash_workers.questions import Question
from dflash_workers.runs import Run
from dflash_workers.wire import Wire

STEPS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
WORD_S = 0.1  # between two events of an answer: much shorter than a window, and few to read
MAX_WORD_IDS = 64
NUM_PROMPTS = 4096  # of the run, at most
LOAD_PATHS = {"SGLang": "/v1/loads"}  # where a server tells how much it has to do, by dialect
_CALL_S = 10.0
_ANSWER_S = 3600.0
_LOOK_EVERY_S = 0.5
_NUM_HALVINGS = 2  # between the last good step and a collapse
_ROUNDED_TO = 8  # requests in flight
_MANY_CACHED = 0.2  # share of prompt tokens from where on a rate says little about new prompts


@dataclass(frozen=True, slots=True)
class Sweep:
    """How it is measured."""

    max_in_flight: int = 512
    settle_s: float = 4.0  # after each step's start, before it is measured
    window_s: float = 10.0  # of each measurement
    max_new_tokens: int = 512  # per answer; the run's own where that is less

    def steps(self) -> list[int]:
        """Upwards, with the largest asked for at the end."""
        return [n for n in STEPS if n < self.max_in_flight] + [self.max_in_flight]


@dataclass(slots=True)
class _Count:
    """What came back so far in one step."""

    tokens: int = 0
    ended: int = 0
    asked_ids: int = 0
    cached_ids: int = 0
    began_s: list[float] = field(default_factory=list)  # time to the first token, in order


class Bench:
    """One sweep. Made and used inside one event loop."""

    def __init__(
        self, url: str, dialect: Dialect, run: Run, prompts: Sequence[list[int]], sweep: Sweep
    ) -> None:
        self._wire = Wire(url)
        self._dialect = dialect
        self._spec = run.spec
        self._sweep = sweep
        sampling = run.spec.sampling
        limit = min(sweep.max_new_tokens, sampling.max_new_tokens)
        self._sampling = replace(sampling, max_new_tokens=limit)
        self._prompts = itertools.cycle(prompts)
        self._facts: Json = {}
        self._draw = random.Random(0)
        self._word_ids = MAX_WORD_IDS // 8  # between two events; by the pace of the step before

    async def measure(self) -> BenchResult:
        """Raises EngineUnavailable where not even the first step can be measured."""
        try:
            await self._read_facts()
            points, warnings = await self._all_steps()
        finally:
            await self._wire.close()
        points.sort(key=lambda point: point.in_flight)
        if max(point.cached_share for point in points) > _MANY_CACHED:
            warnings.append("many prompts came from the engine's cache: plan more, or empty it")
        limit = self._sampling.max_new_tokens
        return BenchResult(self._spec.run, self._facts, limit, points, warnings)

    async def _all_steps(self) -> tuple[list[Point], list[str]]:
        points: list[Point] = []
        for in_flight in self._sweep.steps():
            try:
                point = await self._step(in_flight)
            except EngineUnavailable as error:
                if not points:
                    raise
                return points, [f"{in_flight} in flight: {error}"]
            best = max([*points, point], key=lambda p: p.tokens_per_s)
            points.append(point)
            if is_collapsed(point, best):
                return points + await self._between(points[-2].in_flight, in_flight, best), []
            if lets_wait(point):
                return points, [f"{in_flight} in flight: the engine lets {point.num_waiting} wait"]
        return points, []

    async def _between(self, good: int, collapsed: int, best: Point) -> list[Point]:
        """Narrow down where it collapses."""
        points = []
        for _ in range(_NUM_HALVINGS):
            middle = (good + collapsed) // 2 // _ROUNDED_TO * _ROUNDED_TO
            if not good < middle < collapsed:
                break
            points.append(await self._step(middle))
            if is_collapsed(points[-1], best):
                collapsed = middle
            else:
                good = middle
        return points

    async def _step(self, in_flight: int) -> Point:
        count = _Count()
        asking = [asyncio.create_task(self._keep_asking(count)) for _ in range(in_flight)]
        try:
            await _hold(asking, self._sweep.settle_s)
            before = replace(count, began_s=[])
            num_began, started_s = len(count.began_s), time.monotonic()
            loads = await self._watch(asking)
            seconds = time.monotonic() - started_s
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        rate = (count.tokens - before.tokens) / seconds
        self._word_ids = min(max(int(rate / in_flight * WORD_S), 1), MAX_WORD_IDS)
        firsts_s = sorted(count.began_s[num_began:])
        return Point(
            in_flight=in_flight,
            tokens_per_s=rate,
            tokens_per_s_per_stream=rate / in_flight,
            requests_per_s=(count.ended - before.ended) / seconds,
            ttft_p50_s=statistics.median(firsts_s) if firsts_s else None,
            ttft_p99_s=firsts_s[int(len(firsts_s) * 0.99)] if firsts_s else None,
            kv_usage=max((load["token_usage"] for load in loads), default=None),
            num_waiting=max((load["num_waiting_reqs"] for load in loads), default=None),
            cached_share=count.cached_ids / max(count.asked_ids, 1),
        )

    async def _watch(self, asking: list[asyncio.Task[None]]) -> list[Json]:
        """The engine's own view of its load, through the window."""
        loads: list[Json] = []
        deadline_s = time.monotonic() + self._sweep.window_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            await _hold(asking, min(_LOOK_EVERY_S, left_s))
            # Asked for beside the answers, and only where there is such a thing.
            with suppress(FleetError, LookupError, TypeError, ValueError):
                body = await self._wire.call(LOAD_PATHS[self._dialect.name], _CALL_S)
                loads.append(orjson.loads(body)["loads"][0])
        return loads

    async def _keep_asking(self, count: _Count) -> None:
        """One after the other. The first is cut short, so that not all end at once."""
        limit = self._sampling.max_new_tokens
        cut = self._draw.randint(1, limit)
        for number in itertools.count():
            await self._ask(next(self._prompts), limit if number else cut, count)

    async def _ask(self, input_ids: list[int], limit: int, count: _Count) -> None:
        sampling = replace(self._sampling, max_new_tokens=limit)
        seed = self._draw.getrandbits(31)
        question = Question(input_ids, seed, sampling, self._spec.target.vocab_size)
        rid, started_s, num_ids = uuid.uuid4().hex, time.monotonic(), 0
        asked = self._dialect.ask(question, rid, self._word_ids, self._facts)
        count.asked_ids += len(input_ids)
        async with aclosing(self._wire.events(self._dialect.path, _ANSWER_S, asked)) as events:
            async for event in events:
                body = orjson.loads(event)
                if refusal := self._wire.refusal_in(body):
                    raise refusal
                reply = self._dialect.read(body)
                if not num_ids:
                    count.began_s.append(time.monotonic() - started_s)
                    count.cached_ids += reply.cached_tokens
                count.tokens += reply.num_output - num_ids
                num_ids = reply.num_output
        count.ended += 1

    async def _read_facts(self) -> None:
        body = await self._wire.call(self._dialect.facts_path, _CALL_S)
        self._facts = self._dialect.read_facts(orjson.loads(body))


def prompts_of(store: Store, run: Run, most: int = NUM_PROMPTS) -> list[list[int]]:
    """The first turns of the run's first prompts, as ids. Raises NotEnough where there are none."""
    asked = list(itertools.islice(_first_turns(store, run.spec), most))
    if not asked:
        raise NotEnough(f"run {run.spec.run!r} has no prompts yet: `dflash-fleet enqueue` some")
    return [run.chat.prompt_ids(messages, tools) for messages, tools in asked]


def _first_turns(store: Store, spec: RunSpec) -> Iterator[tuple[list[Json], list[Json]]]:
    for segment in read_segments(store, spec.run):
        for batch in segment.batches:
            for prompt in read_prompts(store, segment, batch):
                yield prompt.turns[0].messages, prompt.tools


async def _hold(asking: list[asyncio.Task[None]], seconds: float) -> None:
    """Wait; raise what a request failed with."""
    failed, _ = await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in failed:
        task.result()
