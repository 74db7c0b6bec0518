"""Machines without engines: the real Follower and Drafting, workers' heartbeats at given speeds.

A drafter's speed stands in `speeds`; one that is missing there can't be started, one in `crashing`
starts and dies. Everything else is real: Redis, S3, the log, the turn.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from dflash_workers.contract.errors import EngineFailed, FleetError, StoreUnavailable
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.serving import ServingLog
from dflash_workers.node.following import Drafting, Follower
from dflash_workers.server import EngineConfig

TICK_S = 0.01
START_S = 0.06
NOISE = 0.05
TOKENS_A_REPLY = 20
LIMIT = 8


@dataclass
class Machine:
    """A slot: one engine and its worker."""

    slot: str
    drafting: Drafting
    up_s: float = 0.0  # when the engine will be up
    tokens: float = 0.0
    uptime_s: float = 0.0
    process: int = 0


@dataclass
class Machines:
    """All slots of a run, moved by one thread; `stop` before the test ends."""

    log: ServingLog
    client: redis.Redis
    keys: RedisKeys
    run: str
    speeds: Mapping[str, float]
    slots: tuple[str, ...] = ("gpu0", "gpu1", "gpu2")
    crashing: frozenset[str] = frozenset()
    unfit: Mapping[str, str] = field(default_factory=dict)  # slot -> a drafter it can't start
    away: int = 0  # times that S3 doesn't answer who stages a drafter
    most_down: int = 0  # engines at once, once all were up
    served: set[tuple[str, str]] = field(default_factory=set)  # slot and drafter, ever
    _leaving: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.follower = Follower(self.log, self.client, self.keys, self.run)
        self._dice = random.Random(3)
        self.machines = [self._machine(slot) for slot in self.slots]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Machines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def leave(self, slot: str) -> None:
        """As a node that is gone with its engine."""
        self._leaving.add(slot)
        while self._leaving:
            time.sleep(TICK_S)

    def serving(self) -> set[str]:
        """What the engines that are up draft with."""
        return {m.drafting.serving for m in self.machines if m.drafting.is_ready}

    def _machine(self, slot: str) -> Machine:
        def engine_with(drafter: str) -> EngineConfig:
            if drafter and self.away:
                self.away -= 1
                raise StoreUnavailable("S3 can't be reached")
            known = drafter in self.speeds or drafter in self.crashing
            if not known or self.unfit.get(slot) == drafter:
                raise EngineFailed(f"{drafter} can't be loaded")
            return EngineConfig(Path("python"), Path("model"), 1)

        return Machine(slot, self.follower.add(slot, engine_with))

    def _run(self) -> None:
        have_all_been_up = False
        while not self._stop.is_set():
            for slot in list(self._leaving):
                self.machines = [machine for machine in self.machines if machine.slot != slot]
                self.follower._draftings.pop(slot)
                self._leaving.discard(slot)
            with suppress(FleetError):
                self.follower.look()
            for machine in self.machines:
                self._move(machine)
            num_down = sum(not m.drafting.is_ready for m in self.machines)
            have_all_been_up |= num_down == 0
            if have_all_been_up:
                self.most_down = max(self.most_down, num_down)
            time.sleep(TICK_S)

    def _move(self, machine: Machine) -> None:
        drafting, now_s = machine.drafting, time.monotonic()
        if not machine.up_s or (drafting.is_ready and self._shall_change(machine)):
            drafting.next_config()
            machine.up_s = now_s + START_S
            machine.process += 1
            machine.tokens = machine.uptime_s = 0.0
        elif not drafting.is_ready and now_s >= machine.up_s:
            drafting.note_ready()
            self.served.add((machine.slot, drafting.serving))
        if drafting.is_ready:
            self._beat(machine)

    def _shall_change(self, machine: Machine) -> bool:
        if machine.drafting.serving in self.crashing:
            return True  # it dies: next_config is asked, and nobody stopped it
        if machine.drafting.is_outdated():
            machine.drafting.note_stopped()
            return True
        return False

    def _beat(self, machine: Machine) -> None:
        speed = self.speeds[machine.drafting.serving] if self.speeds else 0.0
        machine.uptime_s += (
            TICK_S  # its own clock: what it says doesn't hang on this machine's load
        )
        machine.tokens += speed * TICK_S * self._dice.gauss(1, NOISE)
        facts = {
            "state": "up",
            "process": f"{machine.slot}-{machine.process}",
            "uptime_s": f"{machine.uptime_s:.3f}",
            "tokens": f"{int(machine.tokens)}",
            "replies": f"{int(machine.tokens / TOKENS_A_REPLY)}",
            "accept_length": "1.5",
            "in_flight": f"{LIMIT}",
            "max_in_flight": f"{LIMIT}",
        }
        items = [text for fact in facts.items() for text in fact]
        self.client.hset(self.keys.worker(machine.slot), items=items)
        self.client.expire(self.keys.worker(machine.slot), 15)
