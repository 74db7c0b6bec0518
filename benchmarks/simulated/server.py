"""Simulated engines over HTTP, one port each, in one event loop.

Started by the package's command. A request is a few calls from the bytes that came to the bytes
that go, with no task of its own: an engine says when there is something to tell. A dead engine cuts
its connections and closes its port, which is all that is seen of a process that is gone.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import orjson

from benchmarks.simulated.engine import DEAD, FAILING, MODES, UNHEALTHY, Engine, Request
from benchmarks.simulated.replies import Replies, metrics, occupancy
from benchmarks.simulated.wire import TEXT, Connection
from dflash_workers.contract.records import Json

HOST = "127.0.0.1"
HEARD_S = 0.01  # in which the one who wished it dead hears that it is granted

Handler = Callable[[Connection, Json], None]


class EngineServer:
    """One engine at its port."""

    def __init__(self, engine: Engine, replies: Replies, port: int) -> None:
        self._engine, self._replies, self._port = engine, replies, port
        self._asking: dict[Connection, Request | None] = {}
        self._listening: asyncio.Server | None = None
        self._revival: asyncio.Task[None] | None = None
        self._posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/simulate": self._simulate,
        }
        self._tells: dict[str, Callable[[], Json]] = {
            "/server_info": lambda: replies.server_info(engine),
            "/get_server_info": lambda: replies.server_info(engine),
            "/model_info": replies.model_info,
            "/get_model_info": replies.model_info,
            "/v1/models": replies.models,
            "/v1/loads": lambda: replies.loads(engine),
            "/occupancy": lambda: occupancy(engine),
            "/running": lambda: {"running": engine.running(), "num_asked": engine.num_asked},
        }

    async def listen(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: Connection(self), HOST, self._port, backlog=1024
        )

    async def close(self) -> None:
        """Cut off whoever still asks."""
        if self._revival is not None:
            self._revival.cancel()
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._asking):
            connection.cut()
        await asyncio.sleep(0)  # until they know

    def joined(self, connection: Connection) -> None:
        self._asking[connection] = None

    def lost(self, connection: Connection) -> None:
        if request := self._asking.pop(connection, None):
            self._engine.leave(request)

    def serve(self, connection: Connection, path: str, body: bytes) -> None:
        """Answer, now or when the engine has something."""
        if handler := self._posts.get(path):
            try:
                asked = dict(orjson.loads(body))
            except (TypeError, ValueError) as error:
                _refuse(connection, 400, repr(error))
            else:
                handler(connection, asked)
        elif tell := self._tells.get(path):
            self._engine.look()
            connection.reply(200, orjson.dumps(tell()))
        elif path == "/metrics":
            self._engine.look()
            connection.reply(200, metrics(self._engine).encode(), TEXT)
        elif path in ("/health", "/health_generate", "/flush_cache"):
            connection.reply(503 if self._engine.mode == UNHEALTHY else 200)
        else:
            _refuse(connection, 404, f"no {path}")

    def _generate(self, connection: Connection, asked: Json) -> None:
        if asked.get("return_logprob"):
            connection.reply(200, orjson.dumps(self._replies.log_probs(asked["input_ids"])))
        elif self._engine.mode == FAILING:
            _refuse(connection, 500, "broken")
        else:
            try:
                request = self._engine.request(asked, lambda told: self._tell(connection, told))
            except (LookupError, TypeError, ValueError, struct.error) as error:
                _refuse(connection, 400, repr(error))
                return
            self._asking[connection] = request
            self._engine.begin(request)

    def _tell(self, connection: Connection, request: Request) -> None:
        """There is more of it, or it is over."""
        job = request.job
        if job.outcome:
            self._asking[connection] = None
            self._engine.end(request)
        body = self._replies.body(request, self._engine.schedule.num_made(job))
        if not job.stream_every:
            connection.reply(200, body)
        elif job.outcome:
            connection.stream(b"data: " + body + b"\n\ndata: [DONE]\n\n", is_last=True)
        else:
            connection.stream(b"data: " + body + b"\n\n")

    def _abort(self, connection: Connection, asked: Json) -> None:
        if asked.get("abort_all"):
            self._engine.abort_all()
        else:
            self._engine.abort(asked.get("rid", ""))
        connection.reply(200)

    def _simulate(self, connection: Connection, asked: Json) -> None:
        mode = asked.get("mode")
        if mode in MODES:
            self._engine.set_mode(mode)
        elif mode == DEAD and isinstance(for_s := asked.get("for_s"), int | float):
            self._revival = asyncio.create_task(self._be_dead(for_s))
        else:
            _refuse(connection, 400, f"no mode {asked}")
            return
        connection.reply(200)

    async def _be_dead(self, for_s: float) -> None:
        await asyncio.sleep(HEARD_S)
        assert self._listening is not None
        self._listening.close()
        self._engine.die()
        self._asking = dict.fromkeys(self._asking)
        for connection in list(self._asking):
            connection.cut()
        await asyncio.sleep(for_s)
        self._engine.revive()
        await self.listen()


def _refuse(connection: Connection, status: int, why: str) -> None:
    connection.reply(status, orjson.dumps({"error": {"message": why}}))
