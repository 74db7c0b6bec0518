"""One GPU's share of a node: its engine and the worker that keeps the engine busy.

Made by -> machine, one per GPU; each of the two processes is kept by a thread (kept.py). The worker
starts once the engine serves, and stays while the engine is started again: it notices by itself,
gives its batches back and asks again. Invariant: an engine is started anew when it is dead, when
its /health is silent while no token comes, or when its own worker has called it dead for a while;
never because it is busy.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_workers.contract.errors import EngineFailed, Transient
from dflash_workers.launcher import Child, spawn
from dflash_workers.node.effective import check_model, find_differences
from dflash_workers.node.following import Drafting
from dflash_workers.node.kept import Kept, Limits
from dflash_workers.server import EngineConfig, ask_server_info, is_healthy, start_engine

log = logging.getLogger(__name__)

ENGINE_GRACE_S = 10.0
WORKER_GRACE_S = 10.0  # beyond its own: to note, give back and go


@dataclass(frozen=True, slots=True)
class Patience:
    """With an engine that lives."""

    probe_every_s: float = 10.0
    probe_timeout_s: float = 25.0  # SGLang itself gives a generated token 20 s
    silent_s: float = 180.0  # a long prefill answers no probe
    refused_s: float = 60.0  # its worker has called it dead for so long


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """What a lane starts."""

    number: int
    slot: str  # the worker's
    engine: EngineConfig
    worker_argv: tuple[str, ...]
    worker_environ: Mapping[str, str] = field(repr=False)  # holds the keys of S3
    logs: Path
    grace_s: float = 0.0  # the worker's own
    may_idle_out: bool = False  # a worker that leaves by itself isn't brought back
    check_services: Callable[[], object] = lambda: None  # raises where Redis or S3 is away
    models: tuple[Path, ...] = ()  # staged folders that its engine reads
    engine_with: Callable[[str], EngineConfig] | None = None  # by a drafter's id: it follows
    limits: Limits = field(default_factory=Limits)
    patience: Patience = field(default_factory=Patience)


class Lane:
    """The engine and the worker of one GPU."""

    def __init__(self, config: LaneConfig) -> None:
        self.config = config
        self.heartbeat: dict[str, str] = {}  # the worker's, as machine last read it from Redis
        self.drafting: Drafting | None = None  # where it follows what the fleet serves
        self.engine = Kept(EngineProgram(config, self), config.limits)
        # A worker is ready by its heartbeat, which comes late where Redis is away.
        endless = replace(config.limits, ready_s=math.inf)
        self.worker = Kept(WorkerProgram(config, self), endless)
        self._threads: list[threading.Thread] = []

    def start(self, leaving: threading.Event) -> None:
        """Both threads; they end soon after `leaving` is set."""
        self._threads = [
            threading.Thread(target=run, args=(leaving,), daemon=True)
            for run in (self.engine.run, self._run_worker)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """After `leaving` was set. A thread that waits for a probe isn't worth the wait."""
        for thread in self._threads:
            thread.join(timeout_s)

    @property
    def processes(self) -> tuple[Kept, Kept]:
        """In the order in which they are started."""
        return self.engine, self.worker

    def stop_worker(self) -> None:
        """With time to hand its batches on."""
        self.worker.stop(self.config.grace_s + WORKER_GRACE_S)

    def stop_engine(self) -> None:
        """After its worker."""
        self.engine.stop(ENGINE_GRACE_S)

    def _run_worker(self, leaving: threading.Event) -> None:
        while not leaving.is_set():
            if self.engine.is_ready.wait(0.2):
                return self.worker.run(leaving)


class EngineProgram:
    """An engine, its settings read back once it is ready."""

    def __init__(self, config: LaneConfig, lane: Lane) -> None:
        self.name = f"engine-{config.number}"
        self._config = config
        self._lane = lane
        self._probed_s = self._healthy_s = self._trusted_s = 0.0
        self._argv: list[str] = []

    def may_start(self) -> bool:
        """It needs nobody."""
        return True

    def start(self) -> Child:
        """On its GPU alone."""
        drafting = self._lane.drafting
        config = drafting.next_config() if drafting else self._config.engine
        self._argv = config.argv
        return start_engine(config, self._config.logs / f"{self.name}.log")

    def is_ready(self, child: Child) -> bool:
        """Raises EngineFailed where another server answers in its place."""
        info = ask_server_info(self._config.engine.url)
        if info is None or child.poll() is not None:  # another may answer for a dead one
            return False
        check_model(info, self._config.engine.model_dir)
        if self._config.engine.kind == "sglang":
            for difference in find_differences(self._argv, info):
                log.warning("%s: %s", self.name, difference)
        self._probed_s = self._healthy_s = self._trusted_s = time.monotonic()
        if drafting := self._lane.drafting:
            drafting.note_ready()
            if drafting.why_not:  # what an engine died of stays away
                self._lane.engine.forgive()
        return True

    def check(self, child: Child) -> None:
        """Raises EngineFailed for one that lives and answers nothing any more."""
        patience, now_s = self._config.patience, time.monotonic()
        if now_s - self._probed_s < patience.probe_every_s:
            return
        moves = float(self._lane.heartbeat.get("tokens_per_s", 0)) > 0
        if moves or is_healthy(self._config.engine.url, patience.probe_timeout_s):
            self._healthy_s = time.monotonic()
        if not self._lane.heartbeat.get("state", "").startswith("paused: engine"):
            self._trusted_s = time.monotonic()
        self._probed_s = time.monotonic()
        if now_s - self._healthy_s > patience.silent_s:
            raise EngineFailed(
                f"{self.name} hangs: no answer of /health for {patience.silent_s:g} s"
            )
        if now_s - self._trusted_s > patience.refused_s:
            why = self._lane.heartbeat.get("state", "")
            raise EngineFailed(f"{self.name} hangs, says its worker ({why})")

    def prepare_change(self) -> bool:
        """To another drafter: its worker goes first, with time to hand its batches on."""
        drafting = self._lane.drafting
        if drafting is None or not drafting.is_outdated():
            return False
        drafting.note_stopped()
        self._lane.worker.renew(self._config.grace_s + WORKER_GRACE_S)
        return True

    def may_end(self, exit_status: int) -> bool:
        """Never by itself."""
        return False


class WorkerProgram:
    """`dflash-fleet worker` of one engine."""

    def __init__(self, config: LaneConfig, lane: Lane) -> None:
        self.name = f"worker-{config.number}"
        self._config = config
        self._lane = lane
        self._is_waiting = False

    def may_start(self) -> bool:
        """A worker that starts while Redis or S3 is away ends at once: that is no failure of the
        node's, and its engine had better stay."""
        if self._lane.drafting and not self._lane.drafting.is_ready:
            return False
        try:
            self._config.check_services()
        except Transient as error:
            if not self._is_waiting:
                log.warning("%s waits: %s", self.name, error)
            self._is_waiting = True
            return False
        self._is_waiting = False
        return True

    def start(self) -> Child:
        """It checks Redis, S3, the run, the model and the engine by itself."""
        return spawn(
            self._config.worker_argv,
            name=self.name,
            log_path=self._config.logs / f"{self.name}.log",
            environ=self._config.worker_environ,
        )

    def is_ready(self, child: Child) -> bool:
        """Its heartbeat is seen."""
        return bool(self._lane.heartbeat)

    def check(self, child: Child) -> None:
        """A worker looks after itself (watchdog.py), and ends where it can't."""

    def prepare_change(self) -> bool:
        """It serves whatever its engine drafts with."""
        return False

    def may_end(self, exit_status: int) -> bool:
        """By itself only where it was told to leave when there is no work."""
        return exit_status == 0 and self._config.may_idle_out
