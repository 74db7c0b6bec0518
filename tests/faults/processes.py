"""Real processes that a test may stop, kill, freeze and start again: Redis, engines, workers.

Each is a child of the launcher's, so that nothing outlives a test that failed or was killed. A
process keeps its port and its folder over its deaths, as a supervisor's restart would.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import redis

from dflash_workers.embedded import free_ports
from dflash_workers.launcher import Child, spawn

ROOT = Path(__file__).parents[2]
START_S = 60.0  # on a machine whose cores are busy
LOOK_EVERY_S = 0.05  # a look at S3 costs milliseconds of a core that the tested need, too


def until(holds: Callable[[], bool], timeout_s: float = 60, what: str = "it") -> None:
    """Wait; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(LOOK_EVERY_S)


class Process:
    """One program, and at most one living process of it."""

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = folder / f"{name}.log"
        self.environ = dict(environ)
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        assert self._child, f"{self.name} was never started"
        return self._child

    def start(self) -> None:
        """Without waiting for it to be ready."""
        if self._child is not None:
            self._child.stop(0)  # dead already: this lets go of its guardian
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DFLASH_")}
        environ |= {"OMP_NUM_THREADS": "1"} | self.environ
        self._child = spawn(
            self.argv, name=self.name, log_path=self.log_path, environ=environ, cwd=ROOT
        )

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def send(self, number: signal.Signals) -> None:
        """A signal to the process itself."""
        with suppress(ProcessLookupError):
            os.kill(self.child.pid, number)

    def kill(self) -> None:
        """kill -9; it is gone when this returns."""
        self.send(signal.SIGKILL)
        self.child.wait(30)

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return self.child.wait(timeout_s)

    def close(self) -> None:
        """Whatever state it is in. Safe to repeat."""
        if self._child is not None:
            self.send(signal.SIGCONT)
            self._child.stop(0)

    def tail(self, num_lines: int = 60) -> str:
        return self.child.tail(num_lines) if self._child else "(never started)"

    def has_logged(self, text: str) -> bool:
        """Since it was started last."""
        return text in self.child.tail(100_000)


class Redis(Process):
    """A Redis of one's own, with an append-only file."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        (self.port,) = free_ports(1)
        self._password = secrets.token_hex(8)
        data = folder / "redis"
        data.mkdir()
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        argv += ["--requirepass", self._password, "--dir", str(data)]
        argv += ["--appendonly", "yes", "--appendfsync", "everysec"]
        super().__init__("redis", argv, folder, environ or {})

    def url(self, port: int = 0) -> str:
        """Of the server, or of a proxy on `port` before it."""
        return f"redis://:{self._password}@127.0.0.1:{port or self.port}/0"

    def start(self) -> None:
        """Until it answers, its file read again."""
        super().start()
        until(self._answers, 30, "Redis' start")

    def client(self) -> redis.Redis:
        """For the test itself, past every proxy."""
        return redis.Redis.from_url(self.url(), socket_timeout=5)

    def stop(self) -> None:
        """As an operator stops it: the file is written to its end."""
        self.send(signal.SIGTERM)
        self.wait(30)

    def _answers(self) -> bool:
        with self.client() as client, suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(client.ping())
        return False


class EngineServer(Process):
    """engine_process.py, with its token log."""

    def __init__(
        self, name: str, model_dir: Path, folder: Path, *, token_s: float, served_model: str = ""
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.token_log = folder / f"{name}.tokens"
        argv = [sys.executable, "-m", "tests.faults.engine_process", "--port", str(self.port)]
        argv += ["--model-dir", str(model_dir), "--token-log", str(self.token_log)]
        argv += ["--token-s", str(token_s), "--served-model", served_model]
        super().__init__(f"{name}-engine", argv, folder, {})

    def start(self) -> None:
        """Until it answers /health."""
        super().start()
        until(lambda: self._ask("/health") is not None, START_S, f"{self.name}'s start")

    def set_mode(self, mode: str) -> None:
        """ok | 500 | hang | unhealthy; a process started anew is ok."""
        self._ask("/mode", orjson.dumps({"mode": mode}))

    def running(self) -> dict[str, int]:
        """Tokens so far of each request that runs, by its id; nothing while it is away."""
        reply = self._ask("/running")
        return dict(orjson.loads(reply)["running"]) if reply else {}

    @property
    def num_asked(self) -> int:
        """Requests since its start."""
        reply = self._ask("/running")
        return int(orjson.loads(reply)["num_asked"]) if reply else 0

    def _ask(self, path: str, body: bytes | None = None) -> bytes | None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url + path, body)
        try:
            with opener.open(request, timeout=5) as reply:
                return bytes(reply.read())
        except OSError:
            return None


def worker_argv(module: str, flags: Mapping[str, Any]) -> list[str]:
    """`dflash-fleet worker` with flags by name, run by `module`."""
    argv = [sys.executable, "-m", module, "worker"]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    return argv
