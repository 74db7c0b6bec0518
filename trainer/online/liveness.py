"""Ranks that are gone without a word: a host that lost its power, a process that hangs.

A thread of ranks.py. Each rank says in the launcher's store that it lives; the others look. Broken
connections show at once in whatever waits for them; a silent host, or a rank that is stopped, shows
here. A collective that waits in C++ can't be interrupted, so the process ends, with one line.
Invariant: 30 s after a rank fell silent no other one is left.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from dflash_workers.contract.terminal import ExitCode, err
from trainer.online.topology import Launch

BEAT_S = 2.0
SILENCE_S = 24.0  # with a beat and a look at the store on top: below 30
LEFT = "left"


class Liveness(threading.Thread):
    """Until `leaving` is set; whoever sets it joins."""

    def __init__(self, launch: Launch, leaving: threading.Event) -> None:
        super().__init__(name="liveness", daemon=True)
        self._launch = launch
        self._leaving = leaving
        # A client of its own: the process group's may be waiting in a call.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            launch.store_host,
            launch.store_port,
            is_master=False,
            timeout=timedelta(seconds=SILENCE_S),
        )
        # A restarted job finds what the one before it has left in the launcher's store.
        self._keys = [f"dflash/alive/{launch.num_restarts}/{n}" for n in range(launch.num_ranks)]
        self._store.set(self._keys[launch.rank], "0")
        self._store.wait(self._keys)

    def run(self) -> None:
        heard = [(b"", time.monotonic())] * self._launch.num_ranks
        beat = 0
        while not self._leaving.wait(BEAT_S):
            beat += 1
            try:
                self._store.set(self._keys[self._launch.rank], str(beat))
                words = self._store.multi_get(self._keys)
            except RuntimeError:
                self._end("the launcher's store is gone, with the process that kept it")
                return
            now = time.monotonic()
            heard = [
                h if h[0] == word and word != LEFT.encode() else (word, now)
                for h, word in zip(heard, words, strict=True)
            ]
            silent = [n for n, (_, at) in enumerate(heard) if now - at > SILENCE_S]
            if silent:
                self._end(f"rank {silent[0]} has been silent for {SILENCE_S:.0f} s")
                return
        self._say_that_we_left()

    def _say_that_we_left(self) -> None:
        try:
            self._store.set(self._keys[self._launch.rank], LEFT)
        except RuntimeError:
            return  # the others have left, and their store with them

    def _end(self, why: str) -> None:
        if self._leaving.is_set():
            return
        err.print(
            f"dflash-fleet: rank {self._launch.rank}: {why}: training ends here; the same command "
            "goes on from the last checkpoint",
            markup=False,
            soft_wrap=True,
        )
        os._exit(ExitCode.COULD_NOT)
