"""The simulated engines of a campaign, as its program sees them: one process, a port for each.

Started by fleet.py; asked and broken over their own control endpoints (see benchmarks/simulated).
Their token log is the campaign's word on what was sampled, whatever the system under test says.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Any

import orjson

from benchmarks.campaign.configuration import Answers, Engines
from dflash_workers.embedded import free_ports
from tests.faults.processes import Process, until

ASK_S = 10.0  # one that is dead or buried in work says nothing
START_S = 120.0

Facts = dict[str, Any]


class EngineHost:
    """All engines, each by the number of its worker. Ends with its process."""

    def __init__(
        self, model_dir: Path, folder: Path, count: int, engines: Engines, answers: Answers
    ) -> None:
        self.ports = free_ports(count)
        self.token_log = folder / "engines.tokens"
        flags: Facts = {
            "model": model_dir,
            "ports": ",".join(map(str, self.ports)),
            "token_log": self.token_log,
            "preset": engines.preset,
            "time_factor": engines.time_factor,
            "mean_tokens": answers.mean_tokens,
            "variation": answers.variation,
            "tail_share": answers.tail_share,
        }
        if engines.max_running:
            flags["max_running"] = engines.max_running
        argv = [sys.executable, "-m", "benchmarks.simulated"]
        for name, value in flags.items():
            argv += [f"--{name.replace('_', '-')}", str(value)]
        self.process = Process("engines", argv, folder, {})

    def start(self) -> None:
        """Until all answer /health."""
        self.process.start()
        until(lambda: all(map(self.is_up, range(len(self.ports)))), START_S, "the engines' start")

    def url(self, number: int) -> str:
        """Where its worker finds it."""
        return f"http://127.0.0.1:{self.ports[number]}"

    def is_up(self, number: int) -> bool:
        """Whether it answers at all."""
        return self._ask(number, "/health") is not None

    def set_mode(self, number: int, mode: str) -> None:
        """ok | 500 | hang | unhealthy."""
        self._ask(number, "/simulate", {"mode": mode})

    def kill(self, number: int, for_s: float) -> None:
        """All that it runs is lost, and its port refuses for so long; then it is ok, and empty."""
        self._ask(number, "/simulate", {"mode": "dead", "for_s": for_s})

    def running(self, number: int) -> dict[str, int]:
        """Tokens so far of each request that runs, by its id; nothing while it is away."""
        reply = self._ask(number, "/running")
        return dict(orjson.loads(reply)["running"]) if reply else {}

    def occupancy(self, number: int) -> Facts | None:
        """Sums since its start; None while it is away."""
        reply = self._ask(number, "/occupancy")
        return dict(orjson.loads(reply)) if reply else None

    def _ask(self, number: int, path: str, body: Facts | None = None) -> bytes | None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            self.url(number) + path, orjson.dumps(body) if body else None
        )
        try:
            with opener.open(request, timeout=ASK_S) as reply:
                return bytes(reply.read())
        except OSError:
            return None
