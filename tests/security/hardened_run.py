"""A whole small run of real processes over a hardened Redis, with secrets that can be looked for.

The worker and Flower are processes of the command, as people start them; the verbs that end are
called in this process. What they leave behind is collected: all that was ever written to Redis,
every object in S3, what they printed, the pages that they serve or write, and command lines.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import psutil
from typer.testing import CliRunner

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.embedded import free_ports
from fleet import app
from tests.faults.processes import Process, until
from tests.security.tls_redis import TlsRedis

RUN = "guarded"
FORGED = "2026-11-30 00:00:00,000 ERROR forged: this worker is mine"
PROMPTS = [
    {"id": "../../../../etc/passwd", "prompt": "What is two plus two?"},
    {"id": f"a\n{FORGED}", "prompt": "refuse this one"},  # the engine answers 400: a rejection
    {"id": "\x1b]0;forged\x07\x1b[2J", "prompt": "refuse this, too"},
    {"id": "three/..\\..", "prompt": "say:Nothing to see\x00 here\x1b[31m"},
]
NUM_REFUSED = 2
FLOWER_PAGES = ("/", "/workers", "/tasks", "/broker", "/api/workers", "/metrics", "/healthcheck")


@dataclass
class Evidence:
    """By place, what was found there."""

    redis: dict[str, bytes] = field(default_factory=dict)
    s3: dict[str, bytes] = field(default_factory=dict)
    printed: dict[str, bytes] = field(default_factory=dict)
    pages: dict[str, bytes] = field(default_factory=dict)
    command_lines: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)  # of Flower's pages without a login
    facts: dict[str, object] = field(default_factory=dict)  # what `status --json` said


class HardenedRun:
    """Goes the whole way once; `evidence` has what it left."""

    def __init__(self, folder: Path, settings: Settings, redis: TlsRedis) -> None:
        self.folder = folder
        self.settings = dataclasses.replace(settings, run=RUN, slot="guarded-0")
        self.evidence = Evidence()
        self._redis = redis

    def go(self) -> Evidence:
        """Everything, in the order in which people do it."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
        self._ask("enqueue", str(prompts), "--max-tokens", "32", "--seal")
        (port,) = free_ports(1)
        worker = self._process("worker", ["worker", "--wait-s", "20", "--metrics-port", str(port)])
        worker.start()
        try:
            until(self._is_committed, 120, "the commit")
            self.evidence.pages["a worker's /metrics"] = _fetch(port, "/metrics", "")
            with self._flower() as flower_port:
                self._look_at_flower(flower_port)
                self._look_at_command_lines()
        finally:
            worker.send(signal.SIGTERM)
            worker.wait(30)
            worker.close()
        self._note_log(worker)
        self._ask("tokenize")
        for verb in (["status", "--json"], ["status"], ["audit"], ["rejected"], ["runs"]):
            self._ask(*verb)
        for verb in ("gate", "report"):
            page = self.folder / f"{verb}.html"
            self._ask(verb, "--html", str(page))
            self.evidence.pages[page.name] = page.read_bytes()
        self.evidence.facts = orjson.loads(self.evidence.printed["status --json"])
        self._fail_at_the_doors()
        self._collect()
        return self.evidence

    def _process(self, name: str, arguments: Sequence[str]) -> Process:
        environ = {k: v for k, v in self.settings.environment().items() if v}
        return Process(name, [sys.executable, "-m", "fleet", *arguments], self.folder, environ)

    def _ask(self, *arguments: str) -> None:
        """A verb that ends, in this process, which has loaded all that it needs."""
        environ = {k: v for k, v in self.settings.environment().items() if v}
        result = CliRunner().invoke(app, arguments, env=environ, catch_exceptions=False)
        assert result.exit_code in (0, 3), result.output
        self.evidence.printed[" ".join(arguments)] = result.output.encode()

    def _note_log(self, process: Process) -> None:
        self.evidence.printed[process.name] = process.log_path.read_bytes()

    def _is_committed(self) -> bool:
        store = open_store(self.settings)
        try:
            return any(True for _ in store.list(f"{RUN}/commits/"))
        finally:
            store.client.close()

    @contextmanager
    def _flower(self) -> Iterator[int]:
        (port,) = free_ports(1)
        flower = self._process("flower", ["flower", "--port", str(port)])
        flower.start()
        try:
            until(lambda: _status(port, "/healthcheck", "") == 200, 60, "Flower's start")
            yield port
        finally:
            flower.close()
            self._note_log(flower)

    def _look_at_flower(self, port: int) -> None:
        for page in FLOWER_PAGES:
            self.evidence.statuses[page] = _status(port, page, "")
            self.evidence.pages[page] = _fetch(port, page, self.settings.flower_login)

    def _look_at_command_lines(self) -> None:
        for process in psutil.Process().children(recursive=True):
            line = "\n".join(process.cmdline())
            self.evidence.command_lines[f"{process.name()} {process.pid}"] = line.encode()

    def _fail_at_the_doors(self) -> None:
        """What is said of a password or a key that is refused, traceback and all."""
        secret = self.settings.s3_secret_key
        wrong_key = dataclasses.replace(self.settings, s3_secret_key=secret[::-1] + secret)
        password = quote("x" + self._redis.url().partition("fleet:")[2].partition("@")[0])
        wrong_url = self._redis.url(trusted=self._redis.authority.certificate)
        wrong_url = wrong_url.replace("fleet:", f"fleet:{password}")
        wrong_password = dataclasses.replace(self.settings, redis_url=wrong_url)
        for name, attempt in (
            ("S3", lambda: open_store(wrong_key, max_attempts=1).check()),
            ("Redis", lambda: check_redis(open_redis(wrong_password), wrong_password)),
        ):
            try:
                attempt()
            except FleetError:
                self.evidence.printed[f"{name} refuses"] = traceback.format_exc().encode()
        self.evidence.printed["settings"] = repr(self.settings).encode()

    def _collect(self) -> None:
        for number, body in enumerate(self._redis.everything_written()):
            self.evidence.redis[f"append-only file {number}"] = body
        store = open_store(self.settings)
        self.evidence.s3 = {key: store.get(key) for key, _ in store.list("")}
        store.client.close()


def _status(port: int, page: str, login: str) -> int:
    try:
        with _open(port, page, login) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        time.sleep(0.1)
        return 0


def _fetch(port: int, page: str, login: str) -> bytes:
    try:
        with _open(port, page, login) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        return bytes(error.read())


def _open(port: int, page: str, login: str) -> Any:
    url = f"http://127.0.0.1:{port}"
    manager = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if login:
        user, _, password = login.partition(":")
        manager.add_password(None, url, user, password)
        handlers.append(urllib.request.HTTPBasicAuthHandler(manager))
    return urllib.request.build_opener(*handlers).open(url + page, timeout=10)
