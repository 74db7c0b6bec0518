"""An engine that decodes nothing, as a process of its own: SGLang's native API over answers.py.

Started by fleet.py (`python -m tests.faults.engine_process`). All requests advance by a common
clock, `--token-s` seconds a token. Every token "sampled" is written to a log that survives
kill -9, which is how token_log.py knows, outside the system, what was made twice. Words in a user
message: `tokens=40`, `hang`, `refuse` (400), `mismatch` of counts, `fail=2` (500s first), `kills`
(the process dies of it half way). Fault modes of the whole engine are set through /mode.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.faults.answers import Answers, Question, number_in

TICK_S = 0.05


@dataclass(eq=False)
class Running:
    """One request while it is decoded."""

    rid: str
    question: Question
    ids: list[int]  # what it will have made at its end
    ending: str  # stop | length
    show_every: int  # ids from one event of its stream to the next
    num_made: int = 0
    num_shown: int = 0
    reason: str = ""  # stop | length | abort, once it is over
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self, num_tokens: int) -> tuple[int, int]:
        """By as many as are left of these; the places in the whole answer that were sampled."""
        start = self.question.num_given + self.num_made
        self.num_made = min(self.num_made + num_tokens, len(self.ids))
        if self.num_made - self.num_shown >= self.show_every:
            self.num_shown = self.num_made
            self.moved.set()
        return start, self.question.num_given + self.num_made


def begin(asked: dict[str, Any], question: Question) -> Running:
    """A request, its output already cut at the first stop id and at its limit."""
    sampling = asked["sampling_params"]
    ids = question.answer_ids[question.num_given :][: sampling["max_new_tokens"]]
    stops = set(sampling.get("stop_token_ids") or [])
    end = next((at + 1 for at, token in enumerate(ids) if token in stops), len(ids))
    rid = asked.get("rid") or uuid.uuid4().hex
    every = sampling.get("stream_interval", 1) if asked.get("stream") else len(ids) + 1
    ids = ids[:end]
    return Running(rid, question, ids, "stop" if ids and ids[-1] in stops else "length", every)


class EngineProcess:
    """The server's state: what runs, what is counted, what is broken."""

    def __init__(self, answers: Answers, log: int, options: argparse.Namespace) -> None:
        self._answers = answers
        self._log = log
        self._options = options
        self._running: dict[str, Running] = {}
        self._failures: Counter[str] = Counter()
        self._mode = "ok"  # ok | 500 | hang | unhealthy | slow
        self._carry = 0.0
        self.num_asked = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/mode", self._set_mode)
        app.router.add_get("/running", self._show_running)
        app.cleanup_ctx.append(self._ticking)
        return app

    async def _ticking(self, _app: web.Application) -> Any:
        task = asyncio.create_task(self._tick_for_ever())
        yield
        task.cancel()

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + TICK_S, loop.time())
            await asyncio.sleep(due - loop.time())
            if self._mode != "hang":
                self._tick()

    def _tick(self) -> None:
        """All running requests go on by as many tokens as the clock allows."""
        self._carry += TICK_S / self._options.token_s
        num_tokens, self._carry = int(self._carry), self._carry % 1
        made = []
        for request in list(self._running.values()):
            if "hang" in request.question.message:
                continue
            start, end = request.advance(num_tokens)
            if end > start:
                made.append([request.rid, request.question.name, start, end])
            if request.num_made == len(request.ids):
                self._finish(request, request.ending)
        self._note(made=made)
        if any("kills" in r.question.message and r.num_made > 2 for r in self._running.values()):
            os.kill(os.getpid(), signal.SIGKILL)

    def _finish(self, request: Running, reason: str) -> None:
        request.reason = reason
        request.moved.set()
        self._running.pop(request.rid, None)

    def _note(self, **facts: Any) -> None:
        if any(facts.values()):
            os.write(self._log, orjson.dumps({"t": time.time(), **facts}) + b"\n")

    async def _generate(self, web_request: web.Request) -> web.StreamResponse:
        asked = await web_request.json()
        self.num_asked += 1
        if asked.get("return_logprob"):
            return web.json_response(self._log_probs(asked["input_ids"]))
        question = self._answers.read(asked["input_ids"])
        if self._mode == "500" or self._fails(question):
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if "refuse" in question.message:
            return web.json_response({"error": {"message": "refused"}}, status=400)
        request = begin(asked, question)
        self._running[request.rid] = request
        self._note(asked=[request.rid, question.name, question.message, question.num_given])
        try:
            if asked.get("stream"):
                return await self._stream(web_request, request, asked)
            while not request.reason:
                request.moved.clear()
                await request.moved.wait()
            self._note(sent=[request.rid, request.reason])
            return web.json_response(self._reply(request, asked))
        finally:
            if self._running.pop(request.rid, None):
                self._note(left=[request.rid])  # whoever asked is gone

    def _log_probs(self, input_ids: list[int]) -> dict[str, Any]:
        """Of a text, a function of its ids and of these weights."""
        dice = random.Random(f"{self._options.weights} {input_ids}")
        told = [[-dice.random(), token, None] for token in input_ids]
        meta = {"input_token_logprobs": told, "finish_reason": {"type": "length"}}
        return {"text": "", "output_ids": [1], "meta_info": meta}

    def _fails(self, question: Question) -> bool:
        self._failures[question.name] += 1
        return self._failures[question.name] <= number_in(question.message, "fail", 0)

    async def _stream(
        self, web_request: web.Request, request: Running, asked: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(web_request)
        while True:
            await request.moved.wait()
            request.moved.clear()
            if request.reason:
                self._note(sent=[request.rid, request.reason])
            await response.write(b"data: " + orjson.dumps(self._reply(request, asked)) + b"\n\n")
            if request.reason:
                await response.write(b"data: [DONE]\n\n")
                return response

    async def _abort(self, web_request: web.Request) -> web.Response:
        asked = await web_request.json()
        for request in list(self._running.values()):
            if asked.get("abort_all") or request.rid == asked.get("rid"):
                self._finish(request, "abort")
        return web.Response()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._mode == "unhealthy" else 200)

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.17-fake",
                "dtype": "float32",
                "context_length": None,
                "model_path": self._options.model_dir,
                "served_model_name": self._options.served_model,
                "max_running_requests": 1000,
            }
        )

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._options.model_dir,
                "tokenizer_path": self._options.model_dir,
                "is_generation": True,
            }
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self._options.served_model, "object": "model", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    async def _set_mode(self, web_request: web.Request) -> web.Response:
        self._mode = (await web_request.json())["mode"]
        self._note(mode=self._mode)
        return web.Response()

    async def _show_running(self, _request: web.Request) -> web.Response:
        running = {
            request.rid: request.question.num_given + request.num_made
            for request in self._running.values()
        }
        return web.json_response({"running": running, "num_asked": self.num_asked})

    def _reply(self, request: Running, asked: dict[str, Any]) -> dict[str, Any]:
        ids = request.ids[: request.num_made]
        finish: dict[str, Any] | None = {"type": request.reason} if request.reason else None
        if finish and request.reason == "stop":
            finish["matched"] = ids[-1]
        text = self._answers.text(ids[:-1] if request.reason == "stop" else ids)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": len(ids) + ("mismatch" in request.question.message),
            "cached_tokens": 0,
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--served-model", default="")
    parser.add_argument("--weights", default="the run's", help="others have other log-probs")
    parser.add_argument("--token-log", type=Path, required=True)
    parser.add_argument("--token-s", type=float, default=0.01)
    options = parser.parse_args()
    options.served_model = options.served_model or options.model_dir
    log = os.open(options.token_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    engine = EngineProcess(Answers(Path(options.model_dir)), log, options)
    web.run_app(
        engine.app(),
        host="127.0.0.1",
        port=options.port,
        print=None,
        shutdown_timeout=0.1,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
