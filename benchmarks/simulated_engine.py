"""An SGLang without a model: a real HTTP server whose speed and answers' lengths are given.

    python -m benchmarks.simulated_engine --model FOLDER [--mean-tokens 1600] [--step-ms 1]

Asked by a real worker and by `dflash-fleet bench`. All running requests gain tokens at the same
pace, set by how many run (Pace), whatever the machine's load; who comes when it is full waits.
Lengths are lognormal and decided by the request's seed. It speaks `/generate` (streamed at the
interval asked for, the whole output in every event, as SGLang does), `/abort_request`, `/health`,
`/server_info`, `/v1/loads`, `/metrics`, `/flush_cache`, and `/occupancy`, which is its own: what
ran, summed over time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import string
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

TICK_S = 0.004
NUM_LETTERS = 1 << 16  # of text, at least as many as the longest answer has ids

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long one step of all running requests takes, by their number."""

    base_s: float
    per_request_s: float = 0.0
    knee: int = 1 << 30  # more requests than this: a step takes `collapse` times as long
    collapse: float = 1.0
    drafter: Drafter | None = None

    def step_s(self, num_running: int) -> float:
        """Seconds in which each of them gains one token."""
        slower = self.collapse if num_running > self.knee else 1.0
        drafted = self.drafter.step_factor(num_running) if self.drafter else 1.0
        return (self.base_s + self.per_request_s * num_running) * slower * drafted


@dataclass(frozen=True, slots=True)
class Drafter:
    """A pretended one: `simulated.json` in its folder."""

    accept_length: float  # tokens of a verify step
    step_cost: float  # of a verify step, over a plain one
    step_cost_per_request: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> Drafter:
        """Raises KeyError where the drafter is one that can't be loaded."""
        facts = orjson.loads((folder / "simulated.json").read_bytes())
        return cls(facts["accept_length"], facts["step_cost"], facts["step_cost_per_request"])

    def step_factor(self, num_running: int) -> float:
        """Seconds of a token over those without a drafter."""
        cost = self.step_cost + self.step_cost_per_request * num_running
        return cost / self.accept_length


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of answers, in ids."""

    mean: float
    variation: float  # standard deviation over mean; 0: all alike

    def draw(self, seed: int) -> int:
        """The same for the same seed."""
        if not self.variation:
            return round(self.mean)
        sigma2 = math.log(1 + self.variation**2)
        mu = math.log(self.mean) - sigma2 / 2
        return max(1, round(random.Random(seed).lognormvariate(mu, math.sqrt(sigma2))))


@dataclass(eq=False, slots=True)
class Request:
    """One that runs or waits."""

    rid: str
    num_ids: int  # until it ends
    stream_every: int
    gained: float = 0.0
    next_word: int = 1  # ids at which its client hears of it
    is_aborted: bool = False
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_done(self) -> int:
        return min(int(self.gained), self.num_ids)

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.num_done >= self.num_ids

    def gain(self, tokens: float) -> None:
        """Let it go on, and wake its client where that hears of it."""
        self.gained += tokens
        if self.is_over or (self.stream_every and self.num_done >= self.next_word):
            while self.stream_every and self.next_word <= self.num_done:
                self.next_word += self.stream_every
            self.heard.set()


class Words:
    """Answers as JSON: one letter per id, all ids of one width, so that any length is a slice."""

    def __init__(self, model_dir: Path) -> None:
        self.model_path = str(model_dir)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        letters = random.Random(0).choices(string.ascii_lowercase, k=NUM_LETTERS)
        ids = [str(tokenizer.token_to_id(letter)) for letter in letters]
        self._width = max(map(len, ids)) + 1
        if min(map(len, ids)) + 1 != self._width:
            raise ValueError(f"{model_dir}: its letters' ids differ in width")
        self._ids = ",".join(ids).encode() + b","
        self._text = "".join(letters).encode()

    def body(self, rid: str, num_ids: int, stop_id: int | None, meta: Body) -> bytes:
        """A reply or an event with the first `num_ids` of them; the last is the stop id if any."""
        num_letters = num_ids - (stop_id is not None)
        ids = self._ids[: num_letters * self._width]
        ids = ids + str(stop_id).encode() if stop_id is not None else ids[:-1]
        facts = orjson.dumps(meta | {"id": rid, "completion_tokens": num_ids, "cached_tokens": 0})
        text = self._text[:num_letters]
        return b'{"text":"%b","output_ids":[%b],"meta_info":%b}' % (text, ids, facts)


class SimulatedEngine:
    """Made and used inside one event loop."""

    def __init__(self, words: Words, lengths: Lengths, pace: Pace, max_running: int) -> None:
        self._words, self._lengths, self._pace = words, lengths, pace
        self._max_running = max_running
        self._running: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._first_s = self._last_s = 0.0
        self._sums = {"slot_seconds": 0.0, "num_tokens": 0.0, "num_finished": 0, "num_input": 0}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/flush_cache", self._health)
        app.router.add_get("/occupancy", self._occupancy)
        app.cleanup_ctx.append(self._stepping)
        return app

    async def _stepping(self, _app: web.Application) -> Any:
        task = asyncio.create_task(self._step_for_ever())
        yield
        task.cancel()

    async def _step_for_ever(self) -> None:
        self._last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            self._step()

    def _step(self) -> None:
        """Let all gain what the time since the last step is worth; fill what became free."""
        now_s = time.monotonic()
        seconds, self._last_s = now_s - self._last_s, now_s
        num_running = len(self._running)
        if num_running:
            gained = seconds / self._pace.step_s(num_running)
            self._sums["slot_seconds"] += num_running * seconds
            self._sums["num_tokens"] += num_running * gained
            for request in list(self._running.values()):
                request.gain(gained)
                if request.is_over:
                    del self._running[request.rid]
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.popleft()
            self._running[request.rid] = request

    def _admit(self, request: Request) -> None:
        self._first_s = self._first_s or time.monotonic()
        if len(self._running) < self._max_running:
            self._step()  # so that it doesn't gain from before it came
            self._running[request.rid] = request
        else:
            self._waiting.append(request)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        question = orjson.loads(await http.read())
        if question.get("return_logprob"):
            return self._log_probs(question)
        sampling = question["sampling_params"]
        wanted = self._lengths.draw(sampling.get("sampling_seed", 0))
        request = Request(
            question.get("rid", f"{id(question)}"),
            min(wanted, sampling["max_new_tokens"]),
            sampling.get("stream_interval", 1) if question.get("stream") else 0,
        )
        stops = wanted <= sampling["max_new_tokens"] and sampling.get("stop_token_ids")
        stop_id = sampling["stop_token_ids"][0] if stops else None
        self._sums["num_input"] += len(question["input_ids"])
        self._admit(request)
        try:
            return await self._reply(http, request, len(question["input_ids"]), stop_id)
        finally:
            self._running.pop(request.rid, None)
            if request in self._waiting:
                self._waiting.remove(request)

    async def _reply(
        self, http: web.Request, request: Request, num_input: int, stop_id: int | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if request.stream_every:
            await response.prepare(http)
        while True:
            await request.heard.wait()
            request.heard.clear()
            meta: Body = {"prompt_tokens": num_input, "finish_reason": None}
            if request.is_over:
                break
            event = self._words.body(request.rid, request.num_done, None, meta)
            await response.write(b"data: " + event + b"\n\n")
        ended: Body = {"type": "abort"} if request.is_aborted else {"type": "length"}
        if stop_id is not None and not request.is_aborted:
            ended = {"type": "stop", "matched": stop_id}
        at_end = None if request.is_aborted else stop_id
        body = self._words.body(
            request.rid, request.num_done, at_end, meta | {"finish_reason": ended}
        )
        self._sums["num_finished"] += not request.is_aborted
        if not request.stream_every:
            return web.Response(body=body, content_type="application/json")
        await response.write(b"data: " + body + b"\n\ndata: [DONE]\n\n")
        return response

    def _log_probs(self, question: Body) -> web.Response:
        ids = question["input_ids"]
        found = [[None, ids[0], None], *([-1.0, token_id, None] for token_id in ids[1:])]
        meta = {"input_token_logprobs": found}
        return web.json_response({"text": "", "output_ids": [], "meta_info": meta})

    async def _abort(self, http: web.Request) -> web.Response:
        rid = orjson.loads(await http.read())["rid"]
        for request in [*self._waiting, *self._running.values()]:
            if request.rid == rid:
                request.is_aborted = True
                request.heard.set()
        return web.Response()

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _http: web.Request) -> web.Response:
        told = {"version": "simulated", "dtype": "float32", "model_path": self._words.model_path}
        return web.json_response(told | {"max_running_requests": self._max_running})

    async def _loads(self, _http: web.Request) -> web.Response:
        load: Body = {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "token_usage": len(self._running) / self._max_running,
        }
        if self._pace.drafter:
            load["speculative"] = {"accept_length": self._pace.drafter.accept_length}
        return web.json_response({"loads": [load]})

    async def _metrics(self, _http: web.Request) -> web.Response:
        self._step()
        tokens, finished = self._sums["num_tokens"], self._sums["num_finished"]
        return web.Response(
            text=f'sglang:realtime_tokens_total{{mode="decode"}} {tokens}\n'
            f"sglang:num_requests_total {finished}\n"
        )

    async def _occupancy(self, _http: web.Request) -> web.Response:
        self._step()
        facts = {"at_s": self._last_s, "first_s": self._first_s, "num_running": len(self._running)}
        return web.json_response(facts | self._sums)


async def serve(engine: SimulatedEngine, port: int) -> None:
    """Until it is killed."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """The command."""
    import uvloop  # Linux alone has it

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-running", type=int, default=48)
    parser.add_argument("--mean-tokens", type=float, default=1600.0)
    parser.add_argument("--variation", type=float, default=1.0)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--per-request-ms", type=float, default=0.0)
    parser.add_argument("--knee", type=int, default=1 << 30)
    parser.add_argument("--collapse", type=float, default=1.0)
    parser.add_argument("--drafter", type=Path, help="folder with simulated.json")
    args = parser.parse_args()
    drafter = Drafter.read(args.drafter) if args.drafter else None
    pace = Pace(args.step_ms / 1e3, args.per_request_ms / 1e3, args.knee, args.collapse, drafter)
    lengths = Lengths(args.mean_tokens, args.variation)
    engine = SimulatedEngine(Words(args.model), lengths, pace, args.max_running)
    uvloop.run(serve(engine, args.port))


if __name__ == "__main__":
    main()
