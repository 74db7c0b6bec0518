"""A real HTTP server that speaks SGLang's native API; the prompt's last user message says how.

Words in that message: `wait=0.5` seconds before the reply, `fail=2` times a 500 first, `hang`,
`cut` the connection in mid-reply, `mismatch` of ids and count, `refuse` with a 400, `long` until
the length limit, `say:TEXT` as the answer. Everything asked, aborted and running is counted.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STOP = "<|im_end|>"


@dataclass
class FakeEngine:
    """Start with `with`; `url` is known then."""

    tokenizer: Any
    url: str = ""
    asked: list[str] = field(default_factory=list)  # last user message of each request
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # request ids
    running: int = 0
    max_running: int = 0

    def __post_init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._aborts: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        self._runner, self.url = self._do(self._serve())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}"

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"version": "0.5.17-fake", "dtype": "float32", "context_length": None}
        )

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._aborts:
            self._aborts[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        question = await request.json()
        message = self._last_message(question["input_ids"])
        self.asked.append(message)
        self.requests.append(question)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        aborted = self._aborts[question["rid"]] = asyncio.Event()
        try:
            return await self._reply(request, question, message, aborted)
        finally:
            self.running -= 1
            del self._aborts[question["rid"]]

    async def _reply(
        self, request: web.Request, question: dict[str, Any], message: str, aborted: asyncio.Event
    ) -> web.StreamResponse:
        wait_s = 3600.0 if "hang" in message else _number(message, "wait")
        if wait_s:
            try:
                await asyncio.wait_for(aborted.wait(), wait_s)
                return web.json_response(self._body(question, message, "abort"))
            except TimeoutError:
                pass
        if "refuse" in message:
            return web.json_response({"error": {"message": "refused"}}, status=400)
        if self._failures[message] < _number(message, "fail"):
            self._failures[message] += 1
            return web.json_response({"error": {"message": "broken"}}, status=500)
        body = self._body(question, message, "length" if "long" in message else "stop")
        if "cut" in message and not self._failures[message]:
            self._failures[message] += 1
            response = web.StreamResponse(headers={"Content-Length": "10000"})
            await response.prepare(request)
            await response.write(b'{"output_ids": [1')
            assert request.transport
            request.transport.close()
            return response
        return web.json_response(body)

    def _body(self, question: dict[str, Any], message: str, reason: str) -> dict[str, Any]:
        said = message.partition("say:")[2] or f"Answer to {message}"
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        limit = question["sampling_params"]["max_new_tokens"]
        if reason == "length":
            ids = (ids * limit)[:limit]
        elif reason == "stop":
            ids = [*ids, self.tokenizer.convert_tokens_to_ids(STOP)]
        return {
            "text": said,
            "output_ids": ids,
            "meta_info": {
                "id": question["rid"],
                "finish_reason": {"type": reason},
                "prompt_tokens": len(question["input_ids"]),
                "completion_tokens": len(ids) + ("mismatch" in message),
                "cached_tokens": 0,
            },
        }

    def _last_message(self, input_ids: list[int]) -> str:
        text = self.tokenizer.decode(input_ids, skip_special_tokens=False)
        message = text.rpartition("<|im_start|>user\n")[2].partition(STOP)[0]
        return str(message).removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def _number(message: str, name: str) -> float:
    found = re.search(rf"{name}=([\d.]+)", message)
    return float(found[1]) if found else 0.0
