"""The producer of a campaign: a stream of prompts into `dflash-fleet enqueue -`.

Used by course.py, once for the first prompts and again for what is added. Two processes, the maker
of prompts and the producer itself, so that the campaign's own memory has nothing to do with either.
A call that failed (Redis was away) is repeated as it was: what was planned already is a duplicate.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.campaign.fleet import Fleet
from benchmarks.campaign.prompts import Source
from benchmarks.campaign.saying import say
from tests.faults.processes import ROOT

AGAIN_S = 2.0


class Producer:
    """One call of the producer at a time. Close it."""

    def __init__(self, fleet: Fleet) -> None:
        prompts = fleet.configuration.prompts
        self.source = Source(fleet.configuration.seed, prompts.bytes, prompts.two_turns)
        self.num_prompts = 0  # that were asked for, planned or about to be
        self.num_failed = 0  # calls, each of which was repeated
        self._fleet = fleet
        self._first = 0  # of the call that runs
        self._maker: subprocess.Popen[bytes] | None = None
        self._enqueue: subprocess.Popen[bytes] | None = None
        self._again_s = 0.0  # when to repeat a call

    @property
    def is_busy(self) -> bool:
        """Whether something that was asked for may not be planned yet."""
        return self._enqueue is not None or self._again_s > 0

    def add(self, count: int) -> None:
        """Have more prompts planned."""
        assert not self.is_busy
        self._first, self.num_prompts = self.num_prompts, self.num_prompts + count
        self._start()

    def tend(self) -> None:
        """Look whether the call has ended; repeat one that failed."""
        if self._enqueue is not None and (code := self._enqueue.poll()) is not None:
            self.close()
            if code:
                self.num_failed += 1
                self._again_s = time.monotonic() + AGAIN_S
                say(f"enqueue left with {code}: the same again")
        if self._again_s and time.monotonic() > self._again_s:
            self._again_s = 0.0
            self._start()

    def close(self) -> None:
        """End what runs. Safe to repeat."""
        for process in (self._enqueue, self._maker):
            if process is not None:
                process.kill()
                process.wait()
        self._maker = self._enqueue = None

    def _start(self) -> None:
        fleet, source = self._fleet, self.source
        which = [source.seed, self._first, self.num_prompts - self._first]
        numbers = [*which, source.num_bytes, source.two_turns]
        maker = [sys.executable, "-m", "benchmarks.campaign.prompts", *map(str, numbers)]
        enqueue = [sys.executable, "-m", "fleet", "enqueue", "-", "--heldout", "0", "--json"]
        enqueue += ["--batch-size", str(fleet.configuration.prompts.batch_size)]
        settings = fleet.settings_direct().environment()
        environ = os.environ | {name: value for name, value in settings.items() if value}
        with (fleet.folder / "producer.log").open("ab") as log:
            self._maker = subprocess.Popen(
                maker, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
            )
            assert self._maker.stdout
            self._enqueue = subprocess.Popen(
                enqueue, stdin=self._maker.stdout, stdout=log, stderr=log, cwd=ROOT, env=environ
            )
            self._maker.stdout.close()
        fleet.watch.process("producer", "producer", self._enqueue.pid)
        fleet.watch.process("maker", "campaign", self._maker.pid)
