"""A node at work: its lanes started, watched and told, until it is told to leave or gives up.

Run by -> cli_node over what layout.py worked out. The main thread looks at everything once a
second: spot notices, the workers' heartbeats in Redis, the logs' sizes; it writes node.json and
says one line a minute. Leaving: workers first, with time to hand their batches on, engines last.
Invariant: however this process ends, nothing it started stays (launcher.py); one lane that is given
up takes the node with it, loudly, so that a node that is there is whole.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.queues import open_redis, translated_redis
from dflash_workers.contract.records import Json
from dflash_workers.contract.serving import ServingLog
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.node.folder import NodeFolder
from dflash_workers.node.following import Follower
from dflash_workers.node.kept import Kept, State
from dflash_workers.node.lane import WORKER_GRACE_S, Lane, LaneConfig
from dflash_workers.node.rotation import rotate
from dflash_workers.node.screen import Screen
from dflash_workers.notices import Notice, open_notices

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_EVERY_S = 1.0
SAY_EVERY_S = 60.0
ROTATE_EVERY_S = 10.0
REDIS_TIMEOUT_S = 3.0
JOIN_S = 2.0
NOTICE_RESERVE_S = 8.0  # of a notice's time: to tell workers that didn't see it themselves


class Node:
    """One machine's lanes. `run` belongs to the main thread."""

    def __init__(
        self, configs: Sequence[LaneConfig], settings: Settings, folder: NodeFolder
    ) -> None:
        self.lanes = [Lane(config) for config in configs]
        self._settings = settings
        self._folder = folder
        self._redis = open_redis(settings, timeout_s=REDIS_TIMEOUT_S)
        self._keys = RedisKeys(settings.redis_prefix)
        self._notices = open_notices(settings)
        self._follower = self._open_follower()
        self._leaving = threading.Event()
        self._why = ""
        self._notice: Notice | None = None
        self._redis_trouble = ""
        self._said_s = self._rotated_s = time.monotonic()

    def run(self) -> int:
        """Until it is told to leave (0) or gives up (1)."""
        with self._heeding_signals(), Screen() as screen:
            self._follow()
            for lane in self.lanes:
                lane.start(self._leaving)
            while not self._leaving.wait(LOOK_EVERY_S):
                self._look()
                screen.show(self._processes())
        log.warning("leaving: %s", self._why)
        self._drain()
        has_failed = any(kept.state is State.GIVEN_UP for kept in self._processes())
        if has_failed:
            log.error("this node is given up: %s", self._why)
        self._write("given up" if has_failed else "stopped")
        self._redis.close()
        return int(has_failed)

    def leave(self, why: str) -> None:
        """Have `run` end. From any thread, safe to repeat."""
        self._why = self._why or why
        self._leaving.set()

    def _look(self) -> None:
        """Once a second."""
        if self._notices and (notice := self._notices.look()):
            self._notice = notice
            return self.leave(f"{notice}")
        self._read_heartbeats()
        self._follow()
        for kept in self._processes():
            if kept.state is State.GIVEN_UP:
                return self.leave(
                    f"{kept.name} failed too often ({kept.why}); "
                    "see `dflash-fleet node logs`; --gpus leaves a broken GPU out"
                )
        if all(lane.worker.state is State.ENDED for lane in self.lanes):
            return self.leave("there is no work for its workers")
        now_s = time.monotonic()
        if now_s - self._rotated_s > ROTATE_EVERY_S:
            self._rotated_s = now_s
            for path in self._folder.logs.glob("*.log"):
                rotate(path)
        if now_s - self._said_s > SAY_EVERY_S:
            self._said_s = now_s
            log.info("%s", "; ".join(map(_line_of, self.lanes)))
        self._write("serving" if self._is_serving() else "starting")

    def _read_heartbeats(self) -> None:
        """What the workers say of themselves; nothing while Redis is away, for old words would have
        engines judged by what was."""
        try:
            for lane in self.lanes:
                with translated_redis(self._settings.public_redis_url()):
                    found = self._redis.hgetall(self._keys.worker(lane.config.slot))
                lane.heartbeat = {_text(name): _text(value) for name, value in found.items()}
            self._redis_trouble = ""
        except FleetError as error:
            if str(error) != self._redis_trouble:
                log.warning("%s", error)
            self._redis_trouble = str(error)
            for lane in self.lanes:
                lane.heartbeat = {}

    def _follow(self) -> None:
        """What the fleet is to serve; while Redis or S3 is away, what it was."""
        try:
            if self._follower:
                self._follower.look()
        except FleetError as error:
            log.debug("%s", error)  # the heartbeats' reader and the workers say it

    def _open_follower(self) -> Follower | None:
        following = [lane for lane in self.lanes if lane.config.engine_with]
        if not following:
            return None
        run = self._settings.run
        serving = ServingLog(open_store(self._settings), run)
        follower = Follower(serving, self._redis, self._keys, run)
        for lane in following:
            assert lane.config.engine_with
            lane.drafting = follower.add(lane.config.slot, lane.config.engine_with)
        return follower

    def _drain(self) -> None:
        """Workers first, engines last."""
        self._write("leaving")
        self._let_workers_heed_the_notice()
        self._on_each(Lane.stop_worker)
        self._on_each(Lane.stop_engine)
        for lane in self.lanes:
            lane.join(JOIN_S)

    def _let_workers_heed_the_notice(self) -> None:
        """They look at the same sources, and a signal now would be their second: leave at once."""
        if self._notice is None:
            return
        left_s = self._notice.left_s if math.isfinite(self._notice.left_s) else math.inf
        longest_s = max(lane.config.grace_s for lane in self.lanes) + WORKER_GRACE_S
        deadline = time.monotonic() + max(min(left_s - NOTICE_RESERVE_S, longest_s), 0.0)
        workers = [lane.worker for lane in self.lanes]
        while any(w.is_running for w in workers) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _on_each(self, work: Callable[[Lane], None]) -> None:
        with ThreadPoolExecutor(len(self.lanes)) as pool:
            list(pool.map(work, self.lanes))

    def _processes(self) -> list[Kept]:
        return [kept for lane in self.lanes for kept in lane.processes]

    def _is_serving(self) -> bool:
        return all(kept.state in (State.SERVING, State.ENDED) for kept in self._processes())

    def _write(self, state: str) -> None:
        self._folder.write(describe(self.lanes, self._settings.run, state, self._why))

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """The first one: leave; the second one: at once. One that nohup ignores stays ignored.

        They stay in force after the block, until the process is gone.
        """
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._told)
        yield

    def _told(self, number: int, _frame: FrameType | None) -> None:
        if self._leaving.is_set():
            for kept in self._processes():
                if kept.child:
                    kept.child.signal(signal.SIGKILL)
        self.leave(f"told by {signal.Signals(number).name}")


def describe(lanes: Sequence[Lane], run: str, state: str, why: str) -> Json:
    """node.json, but for host and time."""
    return {
        "pid": os.getpid(),
        "run": run,
        "state": state,
        "why": why,
        "lanes": [
            {
                "slot": lane.config.slot,
                "gpu": lane.config.engine.gpu or "cpu",
                "drafter": lane.drafting.serving if lane.drafting else "",
                "port": lane.config.engine.port,
                "engine": _facts_of(lane.engine),
                "worker": _facts_of(lane.worker) | {"heartbeat": lane.heartbeat},
            }
            for lane in lanes
        ],
    }


def _facts_of(kept: Kept) -> Json:
    return {
        "state": kept.state,
        "seconds": round(time.monotonic() - kept.since_s, 1),
        "starts": kept.num_starts,
        "why": kept.why,
        "pid": kept.child.pid if kept.child else None,
    }


def _line_of(lane: Lane) -> str:
    beat = lane.heartbeat
    said = f"{beat['in_flight']} in flight, {beat['tokens_per_s']} tokens/s" if beat else "silent"
    return (
        f"{lane.engine.name} {lane.engine.state}, {lane.worker.name} {lane.worker.state}"
        f" ({beat.get('state', 'no heartbeat')}, {said})"
    )


def _text(word: bytes | str) -> str:
    return word.decode() if isinstance(word, bytes) else word
