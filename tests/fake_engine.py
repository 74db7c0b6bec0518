"""A real HTTP server that speaks SGLang's native API and OpenAI's; the prompt's last user message
says how.

Words in that message: `wait=0.5` seconds before the reply, `fail=2` times a 500 first (`status=N`:
another one; `after=TEXT`: with that Retry-After), `hang`, `cut` the connection in mid-reply (once),
`mismatch` of ids and count, `refuse` with a 400, `long` until the length limit, `say:TEXT` as the
answer (cut at the limit; `say:TEXT||TEXT`: another seed hears the next), `count=N` letters that the
prompt and their place decide, `garbled`, `truncated` JSON, `echo` the prompt, `outside` the
vocabulary, `othertext`, `nostop` (the stop id left out), `stopstring`, `muse` (think) where
the prompt lets it, `musealways`, `gaveup` by itself. In a stream also `step=0.05` seconds between
events, and `stall` after the first, or `endstream` there. What follows an answer's beginning in the
prompt is that answer's rest. Attributes say what kind of server it is. Everything asked, aborted
and running is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fake_replies import ABORTED, Body, Replies, number_in


@dataclass
class FakeEngine:
    """Start with `with`; `url` is known then."""

    tokenizer: Any
    url: str = ""
    asked: list[str] = field(default_factory=list)  # last user message of each request
    requests: list[Body] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # request ids
    running: int = 0
    max_running: int = 0
    is_healthy: bool = True
    num_probes: int = 0  # of its health
    is_incremental: bool = False  # its events hold what is new, not the whole output so far
    streams: bool = True
    hears_aborts: bool = True
    answers_aborts: bool = True
    has_log_probs: bool = True
    noise: float = 0.0  # added to each log-probability
    manner: str = ""  # words that hold for every request
    unheard: str = ""  # a message that isn't counted, nor are log-probabilities then
    facts: Body = field(default_factory=dict)  # more of /server_info
    tells_life: bool = True  # how long its start took
    gives_ids: bool = True  # OpenAI's way
    template: str | None = None  # OpenAI's way; None: the tokenizer's own

    def __post_init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._num_lives = 1
        self._seeds: dict[str, list[int]] = {}  # by message, in the order in which they came
        self._aborts: dict[str, asyncio.Event] = {}
        self._replies = Replies(self.tokenizer)
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

    def die(self) -> None:
        """Stop listening and break every connection, as a killed process does."""
        self._num_lives += 1
        self.hide()

    def hide(self) -> None:
        """The same, but it lives, where nobody reaches it."""

        async def hide() -> None:
            for site in list(self._runner.sites):
                await site.stop()

        self._do(hide())
        self.cut()

    def cut(self) -> None:
        """Break every connection, as a network does."""

        async def cut() -> None:
            for connection in list(self._runner.server.connections):
                connection.transport.abort()

        self._do(cut())

    def revive(self) -> None:
        """Listen again, where it did before."""
        host, port = self.url.removeprefix("http://").split(":")
        self._do(web.TCPSite(self._runner, host, int(port)).start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}"

    async def _health(self, _request: web.Request) -> web.Response:
        self.num_probes += 1
        return web.Response(status=200 if self.is_healthy else 503)

    async def _server_info(self, _request: web.Request) -> web.Response:
        facts: dict[str, Any] = {
            "version": "0.5.17-fake",
            "dtype": "float32",
            "context_length": None,
        }
        if self.tells_life:
            facts |= {"startup_time": {"load_weight": 1.5, "tokenizer_e2e": self._num_lives / 7}}
        return web.json_response(facts | self.facts)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served-name", "max_model_len": 4096}]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if not self.answers_aborts:
            await asyncio.sleep(60)
        if self.hears_aborts and rid in self._aborts:
            self._aborts[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, await request.json(), lambda body: body)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """The same behaviours; asked and answered in OpenAI's words."""
        chat = await request.json()
        prompt = self.tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            chat_template=self.template,
            add_generation_prompt=True,
            tokenize=False,
            **chat.get("chat_template_kwargs", {}),
        )
        input_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        question = chat | {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": chat["max_tokens"]},
        }
        return await self._counted(
            request,
            question,
            lambda body: self._replies.as_chat(body, input_ids if self.gives_ids else None),
        )

    async def _counted(
        self, request: web.Request, question: Body, told: Callable[[Body], Body]
    ) -> web.StreamResponse:
        message = self._replies.last_message(question["input_ids"])
        is_heard = not self.unheard or (
            message != self.unheard and not question.get("return_logprob")
        )
        if is_heard:
            self.asked.append(message)
            self.requests.append(question)
        message = self._by_seed(message, question["sampling_params"].get("sampling_seed", 0))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        message += self.manner
        rid = question.setdefault("rid", "")
        aborted = self._aborts[rid] = asyncio.Event()
        try:
            return await self._reply(request, question, message, aborted, told)
        finally:
            self.running -= 1
            self._aborts.pop(rid, None)

    def _by_seed(self, message: str, seed: int) -> str:
        words, said, answers = message.partition("say:")
        seeds = self._seeds.setdefault(message, [])
        if seed not in seeds:
            seeds.append(seed)
        texts = answers.split("||")
        return words + said + texts[min(seeds.index(seed), len(texts) - 1)]

    async def _reply(
        self,
        request: web.Request,
        question: Body,
        message: str,
        aborted: asyncio.Event,
        told: Callable[[Body], Body],
    ) -> web.StreamResponse:
        wait_s = 3600.0 if "hang" in message else number_in(message, "wait")
        if wait_s:
            try:
                await asyncio.wait_for(aborted.wait(), wait_s)
                return web.json_response(told(self._replies.body(question, message, "abort")))
            except TimeoutError:
                pass
        if refusal := self._refusal(question, message):
            return refusal
        body = self._replies.body(question, message, "length" if "long" in message else "stop")
        if "gaveup" in message and not self._failures[message]:
            self._failures[message] += 1
            body["meta_info"]["finish_reason"] = ABORTED
        if question.get("stream") and self.streams:
            return await self._stream(request, question, body, message, aborted)
        if question.get("return_logprob"):
            found = self._replies.log_probs(question["input_ids"], self.noise)
            body["meta_info"]["input_token_logprobs"] = found
        body = told(body)
        if "cut" in message and not self._failures[message]:
            self._failures[message] += 1
            response = web.StreamResponse(headers={"Content-Length": "10000"})
            await response.prepare(request)
            await response.write(b'{"output_ids": [1')
            assert request.transport
            request.transport.close()
            return response
        if "garbled" in message:
            return web.json_response([1])
        if "truncated" in message:
            return web.Response(text=json.dumps(body)[:-20], content_type="application/json")
        return web.json_response(body)

    def _refusal(self, question: Body, message: str) -> web.Response | None:
        status = int(number_in(message, "status")) or 500
        error = {"error": {"message": "refused", "code": 400}}
        if "refuse" in message or (question.get("return_logprob") and not self.has_log_probs):
            # A refusal inside a stream has status 200.
            if question.get("stream"):
                text = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
                return web.Response(text=text, content_type="text/event-stream")
            return web.json_response(error, status=400)
        if self._failures[message] < number_in(message, "fail"):
            self._failures[message] += 1
            after = re.search(r"after=([^|]+)", message)
            headers = {"Retry-After": after[1].strip()} if after else {}
            return web.json_response({"error": "broken"}, status=status, headers=headers)
        return None

    async def _stream(
        self,
        request: web.Request,
        question: Body,
        body: Body,
        message: str,
        aborted: asyncio.Event,
    ) -> web.StreamResponse:
        every = question["sampling_params"].get("stream_interval") or 1
        whole, finish = body["output_ids"], body["meta_info"]["finish_reason"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        for num_ids in [*range(1, len(whole), every), len(whole)]:
            if sent and "stall" in message:
                await asyncio.wait_for(aborted.wait(), 3600)
            if sent and "endstream" in message:
                break
            if sent and "cut" in message and not self._failures[message]:
                self._failures[message] += 1
                assert request.transport
                request.transport.close()
                return response
            reason: Body | None = finish if num_ids == len(whole) else None
            if aborted.is_set():
                num_ids, reason = sent, ABORTED
            ids = whole[sent if self.is_incremental else 0 : num_ids]
            is_stopped = reason and reason["type"] == "stop"
            event = {
                "text": self._replies.text(ids[:-1] if is_stopped else ids),
                "output_ids": ids,
                "meta_info": body["meta_info"]
                | {"finish_reason": reason, "completion_tokens": num_ids},
            }
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            sent = num_ids
            if reason:
                break
            await asyncio.sleep(number_in(message, "step"))
        await response.write(b"data: [DONE]\n\n")
        return response
