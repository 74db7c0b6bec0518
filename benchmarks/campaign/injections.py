"""How each kind of fault is done, and undone.

Called by course.py with the Scene; schedule.py says what and when. An injection returns what undoes
it after the fault's `hold_s`, or None. A kill waits until its victim's engine is full: a kill of an
idle worker shows nothing.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from benchmarks.campaign import kinds
from benchmarks.campaign.fleet import Fleet
from benchmarks.campaign.schedule import Fault
from tests.faults.clocks import Clock
from tests.faults.http_proxy import Rule
from tests.faults.processes import Process
from tests.faults.proxy import Mode

REDIS_OFF_S = 3.0  # of a lease's 15
WORKERS_OFF_S = 300.0  # signatures of S3 stop being taken at 900
JITTER_EVERY_S = 0.5
ENGINE_AWAY_S = 1.0  # a supervisor has it up again by then
FULL_SHARE = 0.9  # of a worker's requests: an answer ends at any moment, and the next one comes

Undo = Callable[[], None]


@dataclass
class Scene:
    """What may be broken."""

    fleet: Fleet
    leaving: set[str] = field(default_factory=set)  # slots that were told to go
    broken_engines: set[int] = field(default_factory=set)

    def worker(self, fault: Fault) -> Process:
        return self.fleet.workers[self.fleet.slots[fault.victim]]

    @property
    def clocks(self) -> tuple[Clock, Clock] | None:
        """Redis' and the workers'; None on a machine that could not make them."""
        redis_clock, workers_clock = self.fleet.redis_clock, self.fleet.workers_clock
        return (redis_clock, workers_clock) if redis_clock and workers_clock else None

    def is_full(self, victim: int) -> bool:
        """A living worker, and as many requests in its engine as it may have."""
        slot = self.fleet.slots[victim]
        worker = self.fleet.workers.get(slot)
        if worker is None or slot in self.leaving or not worker.is_alive:
            return False
        if victim in self.broken_engines:
            return False
        wanted = FULL_SHARE * self.fleet.configuration.workers.in_flight
        return len(self.fleet.engines.running(victim)) >= wanted

    def is_redis_up(self) -> bool:
        """It answers."""
        if not self.fleet.redis.is_alive:
            return False
        with self.fleet.redis.client() as client, suppress(redis.RedisError):
            return bool(client.ping())
        return False

    def may_happen(self, fault: Fault, victim: int) -> bool:
        """Whether the fault would hit anything now."""
        if fault.kind in _NEEDS_FULL_ENGINE:
            return self.is_full(victim)
        if fault.kind == kinds.CLOCKS:
            return self.clocks is not None
        return fault.kind not in _NEEDS_REDIS or self.is_redis_up()


_NEEDS_REDIS = {*kinds.REDIS_AWAY, kinds.REDIS_FLUSHED}
_NEEDS_FULL_ENGINE = {
    *kinds.WORKERS_GO,
    kinds.ENGINE_KILLED,
    kinds.ENGINE_HANGS,
    kinds.ENGINE_500,
}


def inject(scene: Scene, fault: Fault) -> Undo | None:
    """Do it."""
    return _INJECTIONS[fault.kind](scene, fault)


def _kill_worker(scene: Scene, fault: Fault) -> None:
    scene.fleet.watch.look()
    scene.worker(fault).kill()


def _tell_worker_to_go(scene: Scene, fault: Fault) -> None:
    scene.fleet.watch.look()
    scene.leaving.add(scene.fleet.slots[fault.victim])
    scene.worker(fault).send(signal.SIGTERM)


def _kill_engine(scene: Scene, fault: Fault) -> None:
    scene.fleet.engines.kill(fault.victim, ENGINE_AWAY_S)


def _hang_engine(scene: Scene, fault: Fault) -> Undo:
    return _break_engine(scene, fault.victim, "hang")


def _make_engine_answer_500(scene: Scene, fault: Fault) -> Undo:
    return _break_engine(scene, fault.victim, "500")


def _break_engine(scene: Scene, victim: int, mode: str) -> Undo:
    engines = scene.fleet.engines
    engines.set_mode(victim, mode)
    scene.broken_engines.add(victim)

    def mend() -> None:
        scene.broken_engines.discard(victim)
        if mode == "hang":
            engines.kill(victim, ENGINE_AWAY_S)
        engines.set_mode(victim, "ok")

    return mend


def _stop_redis(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.redis.stop()
    return scene.fleet.start_redis


def _kill_redis(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.redis.kill()
    return scene.fleet.start_redis


def _silence_redis(scene: Scene, fault: Fault) -> Undo:
    proxy = scene.fleet.redis_proxy
    assert proxy
    proxy.set(Mode.FREEZE)
    return lambda: proxy.set(Mode.PASS)


def _flush_redis(scene: Scene, fault: Fault) -> None:
    with scene.fleet.redis.client() as client, suppress(redis.ConnectionError):
        client.flushall()


def _make_s3_answer_503(scene: Scene, fault: Fault) -> Undo:
    rule = Rule("", ".", status=503, code="SlowDown", num_left=int(40 + 30 * fault.strength))
    return _with_rule(scene, rule)


def _lose_s3_replies(scene: Scene, fault: Fault) -> Undo:
    return _with_rule(scene, Rule("PUT", "/(data|commits)/", lose_reply=True, num_left=6))


def _with_rule(scene: Scene, rule: Rule) -> Undo:
    assert scene.fleet.s3_proxy
    rules = scene.fleet.s3_proxy.rules
    rules.append(rule)
    return lambda: rules.remove(rule)


def _reset_s3(scene: Scene, fault: Fault) -> Undo:
    proxy = scene.fleet.s3_proxy
    assert proxy
    proxy.set(Mode.RESET)
    return lambda: proxy.set(Mode.PASS)


def _shake_clocks(scene: Scene, fault: Fault) -> Undo:
    """Forward and back, again and again, the two against one another."""
    assert scene.clocks
    redis_clock, workers_clock = scene.clocks
    dice = random.Random(fault.strength)
    over = threading.Event()

    def shake() -> None:
        while not over.is_set():
            redis_clock.set(dice.uniform(-REDIS_OFF_S, REDIS_OFF_S))
            workers_clock.set(dice.uniform(-WORKERS_OFF_S, WORKERS_OFF_S))
            over.wait(JITTER_EVERY_S)

    thread = threading.Thread(target=shake, daemon=True)
    thread.start()

    def set_right() -> None:
        over.set()
        thread.join()
        redis_clock.set(0.0)
        workers_clock.set(0.0)

    return set_right


_INJECTIONS: dict[str, Callable[[Scene, Fault], Undo | None]] = {
    kinds.WORKER_KILLED: _kill_worker,
    kinds.WORKER_TOLD: _tell_worker_to_go,
    kinds.ENGINE_KILLED: _kill_engine,
    kinds.ENGINE_HANGS: _hang_engine,
    kinds.ENGINE_500: _make_engine_answer_500,
    kinds.REDIS_RESTARTED: _stop_redis,
    kinds.REDIS_KILLED: _kill_redis,
    kinds.REDIS_SILENT: _silence_redis,
    kinds.REDIS_FLUSHED: _flush_redis,
    kinds.S3_503: _make_s3_answer_503,
    kinds.S3_LOST: _lose_s3_replies,
    kinds.S3_RESET: _reset_s3,
    kinds.CLOCKS: _shake_clocks,
}
