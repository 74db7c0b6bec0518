"""The fleet's whole path against a bare client, on one real engine.

Used by fill.py. The fleet: Redis, S3, a worker process, commits. The bare client: the run's own
ids, in the plan's order, with the run's sampling, over aiohttp, and nothing done with the replies.
Both are measured by the engine's own counter of decoded tokens, in turns (fleet, client, fleet,
client), each for so many seconds of which the first and last ten are cut; its cache is emptied
before each. The engine must run with --enable-metrics.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import aiohttp
import orjson
import uvloop

from benchmarks.figures import Figure
from benchmarks.fleet_run import (
    POLL_S,
    ROOT,
    Prompts,
    at_engine,
    cpu_s,
    plan_run,
    running_worker,
    until,
    write_prompts,
)
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.dialects.sglang import Sglang
from dflash_workers.embedded import embedded_services
from dflash_workers.launcher import Child
from dflash_workers.questions import Question
from dflash_workers.runs import open_runs
from producer.api import Run, RunOptions

CUT_S = 10.0
WARM_UP_S = 10.0
MAX_TOKENS = 256
WORDS = 40  # of a prompt: about 128 tokens
SPARE = 1.3  # prompts planned over those that the warm-up's rate will use
GOAL = 0.97
HEADER = ("| in flight | who | tokens/s | requests/s | CPU ms |", "|---|---|---|---|---|")
CPU_GOAL_MS = 1.5
# Plain sampling: what limits the tokens is the engine's forward, not its sampling.
SAMPLING = RunOptions(max_new_tokens=MAX_TOKENS, temperature=0.8, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class Live:
    """A real engine and how long it is measured."""

    url: str
    model_dir: Path
    machine: str  # part of the figures' names
    seconds: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Count:
    """The engine's counters at one moment."""

    at_s: float
    decoded: float  # tokens
    finished: float  # requests

    def since(self, before: Count) -> Count:
        """The differences."""
        return Count(
            self.at_s - before.at_s,
            self.decoded - before.decoded,
            self.finished - before.finished,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """One measurement between its cuts."""

    who: str  # fleet | client
    tokens_per_s: float
    requests_per_s: float
    cpu_ms: float  # of the worker per request; 0 for the client


def measure_live(live: Live, limits: list[int]) -> tuple[list[Figure], str]:
    """Ratios and rates at each limit of requests in flight, and what a person reads with them."""
    figures, lines = [], []
    with tempfile.TemporaryDirectory(prefix="fill-live-") as scratch:
        folder = Path(scratch)
        settings = Settings(model=str(live.model_dir))
        with embedded_services(
            folder / "services", settings, external_redis=False, external_s3=False
        ) as settings:
            for limit in limits:
                seen = Bench(live, settings, folder, limit).alternate()
                figures += figures_of(seen, limit, live.machine)
                lines += [_line(limit, one) for one in seen]
    return figures, "\n".join([*HEADER, *lines])


def figures_of(seen: list[Seen], limit: int, machine: str) -> list[Figure]:
    """Of one limit: the ratio of the means, both rates, and the worker's CPU."""
    fleet = [one for one in seen if one.who == "fleet"]
    client = [one for one in seen if one.who == "client"]
    rate = statistics.fmean(one.tokens_per_s for one in fleet)
    bare = statistics.fmean(one.tokens_per_s for one in client)
    cpu_ms = statistics.fmean(one.cpu_ms for one in fleet)
    cpu_goal = CPU_GOAL_MS if limit == 256 else None
    name = "worker.cpu_ms" if limit == 256 else f"worker.cpu_ms_{limit}"
    return [
        Figure(f"fill.{machine}_{limit}", rate / bare, GOAL, "higher", "ratio"),
        Figure(f"fill.{machine}_{limit}_fleet", rate, None, "higher", "tokens/s"),
        Figure(f"fill.{machine}_{limit}_client", bare, None, "higher", "tokens/s"),
        Figure(name, cpu_ms, cpu_goal, "lower", "ms"),
    ]


class Bench:
    """Measures at one limit."""

    def __init__(self, live: Live, settings: Settings, folder: Path, limit: int) -> None:
        self._live, self._settings, self._folder, self._limit = live, settings, folder, limit
        self._num_runs = 0

    def alternate(self) -> list[Seen]:
        """Fleet, client, fleet, client."""
        rate = self._warm_up()
        num_prompts = int(rate * self._live.seconds * SPARE) + 8 * self._limit
        seen: list[Seen] = []
        bodies: list[bytes] = []
        for _ in range(self._live.repeats):
            with self._planned(num_prompts) as run:
                seen.append(self._fleet(run))
                print(_line(self._limit, seen[-1]), flush=True)
                bodies = bodies or bodies_of(run)
            seen.append(self._client(iter(bodies), self._live.seconds, CUT_S))
            print(_line(self._limit, seen[-1]), flush=True)
        return seen

    def _warm_up(self) -> float:
        """Requests per second of the bare client."""
        with self._planned(8 * self._limit) as run:
            bodies = cycle(bodies_of(run))
        return self._client(bodies, WARM_UP_S, WARM_UP_S / 3).requests_per_s

    @contextmanager
    def _planned(self, count: int) -> Iterator[Run]:
        self._num_runs += 1
        name = f"live-{self._limit}-{self._num_runs}"
        settings = at_engine(self._settings, self._live.url, name, self._limit)
        prompts = Prompts(count, WORDS)
        file = write_prompts(self._folder / f"{name}.jsonl", prompts)
        with plan_run(settings, file, prompts, template_of(SAMPLING)) as run:
            yield run

    def _fleet(self, run: Run) -> Seen:
        flush_cache(self._live.url)
        idle = count(self._live.url)
        with running_worker(run.settings, self._folder / f"{run.spec.run}.log") as worker:
            self._await_work(idle, [worker])
            time.sleep(CUT_S)
            first, cpu_before_s = count(self._live.url), cpu_s(worker)
            time.sleep(self._live.seconds - 2 * CUT_S)
            between, cpu_after_s = count(self._live.url).since(first), cpu_s(worker)
            time.sleep(CUT_S)
            if worker.poll() is not None:
                raise RuntimeError(f"the worker ended:\n{worker.tail()}")
        if run.progress().num_batches_done == run.progress().num_batches:
            raise RuntimeError("the prompts were over before the time was: plan more")
        cpu_ms = (cpu_after_s - cpu_before_s) / max(between.finished, 1) * 1e3
        return _seen("fleet", between, cpu_ms)

    def _client(self, bodies: Iterator[bytes], seconds: float, cut_s: float) -> Seen:
        flush_cache(self._live.url)
        return uvloop.run(self._ask_all(bodies, seconds, cut_s))

    async def _ask_all(self, bodies: Iterator[bytes], seconds: float, cut_s: float) -> Seen:
        limits = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=limits,
            headers={"Content-Type": "application/json"},
        ) as session:
            asking = [asyncio.create_task(self._ask(session, bodies)) for _ in range(self._limit)]
            await asyncio.sleep(cut_s)
            first = await asyncio.to_thread(count, self._live.url)
            await asyncio.sleep(seconds - 2 * cut_s)
            last = await asyncio.to_thread(count, self._live.url)
            await asyncio.sleep(cut_s)
            if any(task.done() for task in asking):
                raise RuntimeError("the prompts were over before the time was: plan more")
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return _seen("client", last.since(first), 0.0)

    async def _ask(self, session: aiohttp.ClientSession, bodies: Iterator[bytes]) -> None:
        for body in bodies:
            async with session.post(f"{self._live.url}/generate", data=body) as reply:
                reply.raise_for_status()
                orjson.loads(await reply.read())

    def _await_work(self, idle: Count, children: list[Child]) -> None:
        until(lambda: count(self._live.url).decoded > idle.decoded + self._limit, children)


def template_of(options: RunOptions) -> RunOptions:
    """The options with the examples' chat template, for a model that brings none."""
    template = (ROOT / "examples" / "chatml.jinja").read_text(encoding="utf-8")
    return RunOptions(
        chat_template=template,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
    )


def bodies_of(run: Run) -> list[bytes]:
    """What a worker would send, prompt by prompt, asked for as one reply."""
    runs = open_runs(run.store, run.spec.run, run.settings.model)
    chat = runs.open(run.spec.run).chat
    bodies = []
    for number, messages in enumerate(_messages_of(run.store, run.spec.run)):
        body = ask_body(run.spec, chat.prompt_ids(messages, []), number)
        bodies.append(orjson.dumps(body))
    return bodies


def ask_body(spec: RunSpec, input_ids: list[int], seed: int) -> Json:
    """A question in the engine's own dialect."""
    question = Question(input_ids, seed, spec.sampling, spec.target.vocab_size)
    return Sglang().ask(question, f"client-{seed}-{time.monotonic_ns()}", 0, {})


def _messages_of(store: Store, run: str) -> Iterator[list[Json]]:
    for segment in read_segments(store, run):
        for batch in segment.batches:
            for prompt in read_prompts(store, segment, batch):
                yield list(prompt.turns[0].messages)


def count(url: str) -> Count:
    """The engine's counters now. Raises RuntimeError where it has none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.findall(r'^sglang:realtime_tokens_total\{.*mode="decode".*\} (\S+)', text, re.M)
    if not found and "sglang:" not in text:
        raise RuntimeError(f"{url} counts nothing: start it with --enable-metrics")
    finished = re.findall(r"^sglang:num_requests_total(?:\{.*\})? (\S+)", text, re.M)
    return Count(time.monotonic(), sum(map(float, found)), sum(map(float, finished)))


def flush_cache(url: str) -> None:
    """Once nothing runs any more."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{url}/flush_cache", data=b"", timeout=30):
                return
        except OSError:  # refused while requests are being aborted
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def _seen(who: str, between: Count, cpu_ms: float) -> Seen:
    seconds = between.at_s
    return Seen(who, between.decoded / seconds, between.finished / seconds, cpu_ms)


def _line(limit: int, one: Seen) -> str:
    rates = f"{one.tokens_per_s:.0f} | {one.requests_per_s:.1f}"
    return f"| {limit} | {one.who} | {rates} | {one.cpu_ms:.2f} |"
