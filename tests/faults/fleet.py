"""One run's whole surroundings out of real processes, each behind a proxy that can break.

A Fleet has a Redis of its own, proxies before Redis and S3, engines, and workers that are
`dflash-fleet worker`. Tests plan and look on through `settings_direct`, past all proxies; workers
get `settings`. Everything ends with the `with`, whatever state it is in; logs stay in the folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.embedded import S3Login
from tests.faults.http_proxy import HttpProxy
from tests.faults.processes import EngineServer, Process, Redis, until, worker_argv
from tests.faults.proxy import Proxy

LONG = "fleet"  # the modules that run the command: with the real leases,
SHORT = "tests.faults.short_leases"  # and with short ones


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a fleet lives."""

    folder: Path
    model_dir: Path
    s3_login: S3Login
    bucket: str


class Fleet:
    """Use in a `with`; Redis runs then, engines and workers are started as they are asked for."""

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        token_s: float = 0.01,
    ) -> None:
        self.place = place
        self.name = name
        self.token_s = token_s
        self.redis = Redis(place.folder)
        self.redis_proxy = Proxy(("127.0.0.1", self.redis.port))
        where = urlsplit(place.s3_login.endpoint)
        self.s3_proxy = HttpProxy((str(where.hostname), where.port or 80))
        self.engines: dict[str, EngineServer] = {}
        self.workers: dict[str, Process] = {}
        self._running = ExitStack()

    def __enter__(self) -> Fleet:
        self._running.callback(self.redis.close)
        self.redis.start()
        self._running.enter_context(self.redis_proxy)
        self._running.enter_context(self.s3_proxy)
        self.store: Store = open_store(self.settings_direct())
        self.hints: Hints = open_hints(self.settings_direct())
        self._running.callback(self.store.client.close)
        self._running.callback(self.hints.redis.close)
        self._running.callback(self.hints.app.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes():
            process.close()
        self._running.close()

    def processes(self) -> Iterator[Process]:
        """All that was started but Redis."""
        yield from self.workers.values()
        yield from self.engines.values()

    def settings_direct(self, run: str = "") -> Settings:
        """For the test: nothing in between."""
        settings = Settings(
            redis_url=self.redis.url(),
            redis_prefix=f"{self.name}:",
            s3_bucket=self.place.bucket,
            s3_prefix=self.name,
            run=run,
            model=str(self.place.model_dir),
        )
        return self.place.s3_login.put_in(settings)

    def settings(self, run: str = "") -> Settings:
        """For a worker or a producer under test: through the proxies."""
        return dataclasses.replace(
            self.settings_direct(run),
            redis_url=self.redis.url(self.redis_proxy.port),
            s3_endpoint=f"http://127.0.0.1:{self.s3_proxy.port}",
        )

    def engine(self, name: str = "engine") -> EngineServer:
        """Started, if it isn't yet. One whose name begins with "slow" is ten times slower."""
        if name not in self.engines:
            folder, model_dir = self.place.folder, self.place.model_dir
            token_s = self.token_s * (10 if name.startswith("slow") else 1)
            self.engines[name] = EngineServer(name, model_dir, folder, token_s=token_s)
        if not self.engines[name].is_alive:
            self.engines[name].start()
        return self.engines[name]

    def worker(
        self, slot: str, settings: Settings, *, module: str = SHORT, grace_s: float = 0.0
    ) -> Process:
        """A worker of this fleet, started and ready. Its settings say run and engine."""
        process = self.make_worker(slot, settings, module=module, grace_s=grace_s)
        heartbeat = self.hints.keys.worker(slot)
        self.hints.redis.delete(heartbeat)  # of a predecessor that was killed
        process.start()
        until(
            lambda: bool(self.hints.redis.exists(heartbeat)) or not process.is_alive,
            what=f"{slot}'s heartbeat",
        )
        assert process.is_alive, process.tail()
        return process

    def make_worker(
        self, slot: str, settings: Settings, *, module: str = SHORT, grace_s: float = 0.0
    ) -> Process:
        """Not started. A slot that had one is taken over: the earlier one is killed."""
        if slot in self.workers:
            self.workers[slot].close()
        values = dataclasses.replace(settings, slot=slot).environment()
        environ = {k: v for k, v in values.items() if v}
        argv = worker_argv(module, {"wait_s": 20, "grace_s": grace_s})
        self.workers[slot] = Process(slot, argv, self.place.folder, environ)
        return self.workers[slot]

    def logs(self) -> str:
        """The end of every log, for a test that failed."""
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in self.processes())
