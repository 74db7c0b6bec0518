"""How each kind of fault of a campaign is done, and undone.

Called by campaign.py with a Scene; schedule.py says what and when. An injection returns what undoes
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

from tests.faults import schedule
from tests.faults.clocks import Clock
from tests.faults.fleet import Fleet
from tests.faults.http_proxy import Rule
from tests.faults.processes import EngineServer, Process
from tests.faults.proxy import Mode
from tests.faults.schedule import Fault

REDIS_OFF_S = 3.0  # of a lease's 15
WORKERS_OFF_S = 300.0  # signatures of S3 stop being taken at 900
JITTER_EVERY_S = 0.5

Undo = Callable[[], None]


@dataclass
class Scene:
    """What may be broken."""

    fleet: Fleet
    slots: list[str]
    max_in_flight: int
    leaving: dict[str, float] = field(default_factory=dict)  # slot -> when it was told to go

    def worker(self, fault: Fault) -> Process:
        return self.fleet.workers[self.slots[fault.victim]]

    def engine(self, fault: Fault) -> EngineServer:
        return self.fleet.engines[self.slots[fault.victim]]

    @property
    def clocks(self) -> tuple[Clock, Clock] | None:
        """Redis' and the workers'; None on a machine that could not make them."""
        redis_clock, workers_clock = self.fleet.redis_clock, self.fleet.workers_clock
        return (redis_clock, workers_clock) if redis_clock and workers_clock else None

    def is_full(self, victim: int) -> bool:
        """A living worker, and as many requests in its engine as it may have."""
        slot = self.slots[victim]
        if slot in self.leaving or not self.fleet.workers[slot].is_alive:
            return False
        return len(self.fleet.engines[slot].running()) >= self.max_in_flight

    def is_redis_up(self) -> bool:
        """It answers."""
        with self.fleet.redis.client() as client, suppress(redis.RedisError):
            return self.fleet.redis.is_alive and bool(client.ping())
        return False

    def may_happen(self, fault: Fault, victim: int) -> bool:
        """Whether the fault would hit anything now."""
        if fault.kind in _NEEDS_FULL_ENGINE:
            return self.is_full(victim)
        if fault.kind == schedule.CLOCKS:
            return self.clocks is not None
        return fault.kind not in _NEEDS_REDIS or self.is_redis_up()


_NEEDS_REDIS = {
    schedule.REDIS_RESTART,
    schedule.REDIS_KILL,
    schedule.REDIS_FREEZE,
    schedule.FLUSHALL,
}
_NEEDS_FULL_ENGINE = {
    schedule.KILL,
    schedule.SIGTERM,
    schedule.ENGINE_KILL,
    schedule.ENGINE_HANG,
    schedule.ENGINE_500,
}


def inject(scene: Scene, fault: Fault) -> Undo | None:
    """Do it."""
    return _INJECTIONS[fault.kind](scene, fault)


def _kill_worker(scene: Scene, fault: Fault) -> None:
    scene.worker(fault).kill()


def _tell_worker_to_go(scene: Scene, fault: Fault) -> None:
    scene.worker(fault).send(signal.SIGTERM)


def _kill_engine(scene: Scene, fault: Fault) -> None:
    scene.engine(fault).kill()


def _hang_engine(scene: Scene, fault: Fault) -> Undo:
    engine = scene.engine(fault)
    engine.set_mode("hang")
    return engine.kill


def _make_engine_answer_500(scene: Scene, fault: Fault) -> Undo:
    engine = scene.engine(fault)
    engine.set_mode("500")
    return lambda: engine.set_mode("ok")


def _stop_redis(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.redis.stop()
    return scene.fleet.redis.start


def _kill_redis(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.redis.kill()
    return scene.fleet.redis.start


def _silence_redis(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.redis_proxy.set(Mode.FREEZE)
    return lambda: scene.fleet.redis_proxy.set(Mode.PASS)


def _flush_redis(scene: Scene, fault: Fault) -> None:
    with scene.fleet.redis.client() as client, suppress(redis.ConnectionError):
        client.flushall()


def _make_s3_answer_503(scene: Scene, fault: Fault) -> Undo:
    rule = Rule("", ".", status=503, code="SlowDown", num_left=int(40 + 30 * fault.strength))
    return _with_rule(scene, rule)


def _lose_s3_replies(scene: Scene, fault: Fault) -> Undo:
    return _with_rule(scene, Rule("PUT", "/(data|commits)/", lose_reply=True, num_left=6))


def _with_rule(scene: Scene, rule: Rule) -> Undo:
    rules = scene.fleet.s3_proxy.rules
    rules.append(rule)
    return lambda: rules.remove(rule)


def _reset_s3(scene: Scene, fault: Fault) -> Undo:
    scene.fleet.s3_proxy.set(Mode.RESET)
    return lambda: scene.fleet.s3_proxy.set(Mode.PASS)


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
    schedule.KILL: _kill_worker,
    schedule.SIGTERM: _tell_worker_to_go,
    schedule.ENGINE_KILL: _kill_engine,
    schedule.ENGINE_HANG: _hang_engine,
    schedule.ENGINE_500: _make_engine_answer_500,
    schedule.REDIS_RESTART: _stop_redis,
    schedule.REDIS_KILL: _kill_redis,
    schedule.REDIS_FREEZE: _silence_redis,
    schedule.FLUSHALL: _flush_redis,
    schedule.S3_503: _make_s3_answer_503,
    schedule.S3_LOST: _lose_s3_replies,
    schedule.S3_RESET: _reset_s3,
    schedule.CLOCKS: _shake_clocks,
}
