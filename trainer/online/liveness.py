"""Ranks that are gone: killed, on a host that lost its power, or hung. Found, named, said once.

A thread of ranks.py. Each rank counts in the launcher's store while it lives; the others look. A
broken connection says that some rank is gone, not which: the rank that met it says so in the store
(HURT), and whoever then stays silent for HURT_SILENCE_S is the one. A rank that hangs breaks no
connection and is found by SILENCE_S. A collective that waits in C++ can't be interrupted, so that a
process that doesn't come out by itself ends here. Invariants: 30 s after a rank fell silent no
other one waits for it; one line names it, whoever is first; a rank that ends by an error of its own
(FAILED) or because it was asked to (LEFT) has had its say, and the others are quiet.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dflash_workers.contract.errors import Transient
from dflash_workers.contract.terminal import ExitCode, err
from trainer.online.topology import Launch

BEAT_S = 2.0
SILENCE_S = 24.0  # with a beat and a look at the store on top: below 30
HURT_SILENCE_S = 6.0  # three beats, where a broken connection says that somebody is gone
LEAVING_S = 10.0  # for a process to come out by itself, once it is clear that it should
LEFT, FAILED, HURT = "left", "failed", "hurt"


@dataclass(frozen=True, slots=True)
class _Verdict:
    text: str  # empty: another rank says it
    patience_s: float  # for this process to come out by itself


class Liveness(threading.Thread):
    """Until `end` is called, or somebody else's end is clear."""

    def __init__(self, launch: Launch, hurt: threading.Event) -> None:
        """`hurt`: set by this process once it met a broken connection."""
        super().__init__(name="liveness", daemon=True)
        self._launch = launch
        self._hurt = hurt
        self._ending = threading.Event()
        self._last_word = LEFT
        self._is_judged = threading.Event()
        # A client of its own: the process group's may be waiting in a call.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            launch.store_host,
            launch.store_port,
            is_master=False,
            timeout=timedelta(seconds=SILENCE_S),
        )
        # A restarted job finds what the one before it has left in the launcher's store.
        prefix = f"dflash/{launch.num_restarts}"
        self._keys = [f"{prefix}/alive/{n}" for n in range(launch.num_ranks)]
        self._said = f"{prefix}/said"
        self._words = [""] * launch.num_ranks
        self._heard = [0.0] * launch.num_ranks  # when each word was new
        self._hurt_at = 0.0  # when somebody was first seen to be hurt; 0: nobody is
        self._store.set(self._keys[launch.rank], "0")
        self._store.wait(self._keys)

    def end(self, word: str) -> None:
        """Have the others know that this rank leaves, and how; from here on nobody is judged."""
        self._last_word = word
        self._ending.set()
        self.join()

    def wait_until_clear(self) -> bool:
        """After a broken connection: until it is clear who is gone, and has been said. False: it
        doesn't get clear.
        """
        return self._is_judged.wait(HURT_SILENCE_S + 3 * BEAT_S)

    def linger(self) -> None:
        """After `end`: for as long as others look into the store, where rank 0 keeps it."""
        deadline = time.monotonic() + LEAVING_S
        keeps_store = self._launch.rank == 0 and not dist.is_torchelastic_launched()
        while keeps_store and self._is_somebody_looking() and time.monotonic() < deadline:
            time.sleep(BEAT_S / 4)

    def run(self) -> None:
        self._heard = [time.monotonic()] * self._launch.num_ranks
        beat = 0
        while not self._ending.wait(BEAT_S):
            beat += 1
            try:
                self._look(HURT if self._hurt.is_set() else str(beat))
                verdict = self._verdict()
                if verdict and verdict.text and self._store.add(self._said, 1) > 1:
                    verdict = _Verdict("", verdict.patience_s)  # another rank was first
            except RuntimeError:
                verdict = self._verdict_without_store()
            if verdict:
                self._judge(verdict)
                return
        self._put(self._last_word)

    def _look(self, word: str) -> None:
        self._store.set(self._keys[self._launch.rank], word)
        words, now = self._read(), time.monotonic()
        for rank, said in enumerate(words):
            if said != self._words[rank] or said in (HURT, FAILED, LEFT):
                self._heard[rank] = now
        self._words = words
        if HURT in words and not self._hurt_at:
            self._hurt_at = now

    def _verdict(self) -> _Verdict | None:
        """None: all is well, as far as is known."""
        if FAILED in self._words:
            return _Verdict("", LEAVING_S)
        now = time.monotonic()
        limit_s = HURT_SILENCE_S if self._hurt_at else SILENCE_S
        silent = [str(n) for n, at in enumerate(self._heard) if now - at > limit_s]
        if silent and self._hurt_at:
            return _Verdict(f"rank {', '.join(silent)} is gone", LEAVING_S)
        if silent:
            return _Verdict(f"rank {', '.join(silent)} has been silent for {SILENCE_S:.0f} s", 0)
        if self._hurt_at and LEFT in self._words and now - self._hurt_at > HURT_SILENCE_S:
            return _Verdict(f"rank {self._words.index(LEFT)} was asked to leave", LEAVING_S)
        return None

    def _verdict_without_store(self) -> _Verdict:
        if self._words[0] in (HURT, FAILED, LEFT):
            return _Verdict("", LEAVING_S)
        if dist.is_torchelastic_launched():
            text, is_said_here = "the launcher is gone", self._launch.local_rank == 0
        else:
            text, is_said_here = "rank 0 is gone", self._launch.rank == 1
        return _Verdict(text if is_said_here else "", LEAVING_S)

    def _judge(self, verdict: _Verdict) -> None:
        if self._ending.is_set():
            return
        if verdict.text:
            err.print(
                f"dflash-fleet: {verdict.text}: training ends here; the same command goes on from "
                "the last checkpoint",
                markup=False,
                soft_wrap=True,
            )
        # For whoever started this process: it is no fault of its own.
        get_error_handler().record_exception(Transient(verdict.text or "another rank is gone"))
        self._put(self._last_word)
        self._is_judged.set()
        deadline = time.monotonic() + verdict.patience_s
        while not (self._hurt.is_set() or self._ending.is_set()):
            if time.monotonic() >= deadline:
                os._exit(ExitCode.COULD_NOT)
            time.sleep(BEAT_S / 8)

    def _read(self) -> list[str]:
        return [word.decode() for word in self._store.multi_get(self._keys)]

    def _put(self, word: str) -> None:
        try:
            self._store.set(self._keys[self._launch.rank], word)
        except RuntimeError:
            return  # the others have left, and their store with them

    def _is_somebody_looking(self) -> bool:
        """Whether a rank is there that is neither done nor was silent when this one last looked."""
        try:
            words = self._read()
        except RuntimeError:
            return False
        now = time.monotonic()
        return any(
            word not in (LEFT, FAILED) and now - heard < HURT_SILENCE_S
            for rank, (word, heard) in enumerate(zip(words, self._heard, strict=True))
            if rank != self._launch.rank
        )
