"""The real parts of a campaign: Redis, S3, engines, workers, tokenizers, and proxies between them.

Started by __main__.py in the folder that keeps all logs, broken by injections.py. The campaign's
own questions go past all proxies (`settings_direct`); workers get `settings`. Everything ends with
the `with`, whatever state it is in. Each process that starts is told to whoever watches.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import psutil

from benchmarks.campaign.configuration import Configuration
from benchmarks.campaign.engines import EngineHost
from benchmarks.campaign.saying import say
from benchmarks.campaign.watching import Watch
from benchmarks.fleet_run import make_long_context
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import start_s3
from tests.faults.clocks import Clock
from tests.faults.http_proxy import HttpProxy
from tests.faults.processes import Process, Redis, worker_argv
from tests.faults.proxy import Proxy
from tests.tiny_model import CONTEXT_LEN, make_tiny_model

BUCKET = "campaign"
PREFIX = "campaign"
WAIT_S = 60.0  # of a worker for its engine
STOP_S = 15.0  # for those that are told to go at the very end


class Fleet:
    """Use in a `with`; Redis, S3 and the engines run then."""

    def __init__(self, configuration: Configuration, folder: Path, watch: Watch) -> None:
        self.configuration = configuration
        self.folder = folder
        self.run = configuration.name
        self.model_dir = _make_model(folder / "model", configuration)
        self.watch = watch
        self.redis_clock, self.workers_clock = _clocks(folder, configuration)
        self.redis = Redis(folder, self.redis_clock.environ if self.redis_clock else {})
        self.slots = [f"w{number}" for number in range(configuration.workers.count)]
        self.engines = EngineHost(
            self.model_dir, folder, len(self.slots), configuration.engines, configuration.answers
        )
        self.workers: dict[str, Process] = {}
        self.tokenizers: list[Process] = []
        self.redis_proxy: Proxy | None = None
        self.s3_proxy: HttpProxy | None = None
        self._running = ExitStack()

    def __enter__(self) -> Fleet:
        with ExitStack() as failed:
            failed.enter_context(self._running)
            self._start_services()
            failed.pop_all()
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

    def processes(self) -> list[Process]:
        """All that work on the run."""
        return [*self.workers.values(), *self.tokenizers, self.engines.process]

    def settings_direct(self) -> Settings:
        """For the campaign itself: nothing in between."""
        settings = Settings(
            redis_url=self.redis.url(),
            redis_prefix=f"{PREFIX}:",
            s3_bucket=BUCKET,
            s3_prefix=PREFIX,
            run=self.run,
            model=str(self.model_dir),
        )
        return self.s3_login.put_in(settings)

    def settings(self) -> Settings:
        """For workers and tokenizers: through the proxies, where there are any."""
        settings = self.settings_direct()
        if self.redis_proxy:
            url = self.redis.url(self.redis_proxy.port)
            settings = dataclasses.replace(settings, redis_url=url)
        if self.s3_proxy:
            url = f"http://127.0.0.1:{self.s3_proxy.port}"
            settings = dataclasses.replace(settings, s3_endpoint=url)
        return settings

    def start_worker(self, number: int) -> None:
        """Start it, or start it again."""
        slot = self.slots[number]
        if slot not in self.workers:
            self.workers[slot] = self._make_worker(number)
        self.workers[slot].start()
        self.watch.process(slot, "worker", self.workers[slot].child.pid)

    def start_tokenizers(self) -> None:
        """All of them; each has a process that listens and one that works."""
        environ = _environ(self.settings())
        for number in range(self.configuration.tokenizers.count):
            argv = worker_argv("fleet", {"queue": "tokenize", "batches": 1})
            tokenizer = Process(f"tokenizer{number}", argv, self.folder, environ)
            tokenizer.start()
            self.tokenizers.append(tokenizer)
            self.watch.process(tokenizer.name, "tokenizer", tokenizer.child.pid)

    def watch_children_of_tokenizers(self) -> None:
        """Those that do the work, once they are there; again for those that came since."""
        known = {one.pid for one in self.watch.watched}
        for tokenizer in self.tokenizers:
            try:
                children = psutil.Process(tokenizer.child.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            for child in children:
                if child.pid not in known:
                    self.watch.process(f"{tokenizer.name}.{child.pid}", "tokenizer", child.pid)

    def start_redis(self) -> None:
        """Until it answers; it is another process than before."""
        self.redis.start()
        self.watch.process("redis", "redis", self.redis.child.pid)

    def stop_workers(self) -> None:
        """As an operator does at the end."""
        for worker in self.workers.values():
            if worker.is_alive:
                worker.child.stop(STOP_S)

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"--- {p.name}\n{p.tail(15)}" for p in self.processes())

    def _start_services(self) -> None:
        between, running = self.configuration.between, self._running
        self.watch.process("campaign", "campaign", os.getpid())
        s3, self.s3_login = start_s3(self.folder, BUCKET)
        running.callback(s3.stop, 0)
        self.watch.process("weed", "s3", s3.pid)
        running.callback(self.redis.close)
        self.start_redis()
        if between.redis_proxy:
            self.redis_proxy = running.enter_context(Proxy(("127.0.0.1", self.redis.port)))
        if between.s3_proxy:
            where = urlsplit(self.s3_login.endpoint)
            proxy = HttpProxy((str(where.hostname), where.port or 80))
            self.s3_proxy = running.enter_context(proxy)
        self.engines.start()
        self.watch.process("engines", "engines", self.engines.process.child.pid)

    def _make_worker(self, number: int) -> Process:
        workers = self.configuration.workers
        settings = dataclasses.replace(
            self.settings(),
            slot=self.slots[number],
            engine_url=self.engines.url(number),
            max_in_flight=workers.in_flight,
        )
        environ = _environ(settings)
        environ |= self.workers_clock.environ if self.workers_clock else {}
        argv = worker_argv("fleet", {"wait_s": WAIT_S, "grace_s": workers.grace_s})
        return Process(self.slots[number], argv, self.folder, environ)


def _environ(settings: Settings) -> dict[str, str]:
    return {name: value for name, value in settings.environment().items() if value}


def _make_model(folder: Path, configuration: Configuration) -> Path:
    """Room for the longest answer after the longest prompt."""
    wanted = 2 * (configuration.answers.max_tokens + configuration.prompts.bytes)
    make_tiny_model(folder)
    make_long_context(folder, max(CONTEXT_LEN, wanted))
    return folder


def _clocks(folder: Path, configuration: Configuration) -> tuple[Clock | None, Clock | None]:
    """Redis' and the workers'; none on a machine that can't make them."""
    if not configuration.between.clocks:
        return None, None
    try:
        return Clock(folder, "redis"), Clock(folder, "workers")
    except FileNotFoundError as error:
        say(str(error))
        return None, None
