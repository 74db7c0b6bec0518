"""A run of thousands of prompts under a drawn schedule of faults, and what came of it.

    python -m tests.faults.campaign --seed 7 --minutes 5 --workers 4 --prompts 3000

Real workers, one engine process each, a Redis and an S3 of their own, every connection through a
proxy. Whoever dies is started again after a second, as a supervisor would; somebody reconciles once
a lease, as an operator's cron would. Afterwards verdict.py proves the run and says what was made
twice and why. Exit code 3 where a law is broken. The same seed draws the same schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.records import Json
from dflash_workers.embedded import start_s3
from producer.api import EnqueueOptions, Run, RunOptions
from producer.reconcile import Reconciler
from tests.faults import schedule, verdict
from tests.faults.clocks import Clock
from tests.faults.fleet import LONG, Fleet, Place
from tests.faults.injections import Scene, Undo, inject
from tests.faults.reasons import Happened
from tests.faults.schedule import Fault
from tests.faults.verdict import Report
from tests.tiny_model import make_tiny_model

BUCKET = "campaign"
BATCH_SIZE = 16
RESTART_AFTER_S = 1.0
PRECONDITION_S = 30.0  # a fault that can't happen for so long takes another victim, or is left out
FINISH_S = 240.0
MEAN_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Options:
    """One campaign."""

    seed: int = 7
    minutes: float = 5.0
    workers: int = 4
    prompts: int = 3000
    faults: int = 40
    max_in_flight: int = 12

    @property
    def command(self) -> str:
        """What draws the same faults over the same prompts."""
        flags = ("seed", "minutes", "workers", "prompts", "faults")
        words = (f"--{name} {getattr(self, name):g}" for name in flags)
        return f"python -m tests.faults.campaign {' '.join(words)}"

    @property
    def faults_s(self) -> float:
        """From the first fault's earliest moment to the last one's."""
        return self.minutes * 60 * 0.75

    @property
    def token_s(self) -> float:
        """Slow enough that the prompts last for three quarters of the faults: more are planned as
        they run out."""
        tokens_at_once = self.workers * self.max_in_flight
        return round(0.6 * self.faults_s * tokens_at_once / (self.prompts * MEAN_TOKENS), 4)


@dataclass
class Campaign:
    """One, while it runs."""

    options: Options
    scene: Scene
    run: Run
    reconciler: Reconciler
    started_s: float = field(default_factory=time.monotonic)
    num_prompts: int = 0
    happened: list[Happened] = field(default_factory=list)
    left_out: list[Fault] = field(default_factory=list)
    exit_codes: list[tuple[bool, int]] = field(default_factory=list)  # told to go?, code
    cpu_s: dict[int, float] = field(default_factory=dict)  # by pid, of workers
    _undos: list[tuple[float, Undo]] = field(default_factory=list)
    _died_s: dict[str, float] = field(default_factory=dict)
    _looked_s: float = 0.0

    def meet(self, faults: list[Fault]) -> None:
        """Every fault in turn, and then peace."""
        for fault in faults:
            while time.monotonic() < self.started_s + fault.at_s:
                self._tend()
            self._meet(fault)
        while self._undos:
            self._tend()

    def finish(self) -> bool:
        """Until every batch is committed; False if it never came to that."""
        deadline = time.monotonic() + FINISH_S
        self.run.seal()
        while time.monotonic() < deadline:
            self._tend()
            self.reconciler.ledger.refresh()
            if not self.reconciler.ledger.open:
                return True
        return False

    def plan(self, num_prompts: int) -> None:
        """More prompts of the seed's."""
        rows = islice_rows(self.options.seed, self.num_prompts, num_prompts)
        self.run.enqueue(rows, EnqueueOptions(batch_size=BATCH_SIZE, heldout=0.0))
        self.num_prompts += num_prompts

    def _meet(self, fault: Fault) -> None:
        deadline = time.monotonic() + PRECONDITION_S
        while not self.scene.may_happen(fault, fault.victim):
            self._tend()
            if time.monotonic() > deadline:
                others = [
                    victim
                    for victim in range(self.options.workers)
                    if self.scene.may_happen(fault, victim)
                ]
                if not others:
                    self.left_out.append(fault)
                    _say(f"left out: {fault.kind}: nothing it could hit")
                    return
                fault = dataclasses.replace(fault, victim=others[0])
        slot = self.scene.slots[fault.victim]
        num_running = len(self.scene.fleet.engines[slot].running())
        at_s = time.time()
        undo = inject(self.scene, fault)
        if fault.kind == schedule.SIGTERM:
            self.scene.leaving[slot] = time.monotonic()
        self.happened.append(Happened(fault.kind, slot, at_s, fault.hold_s, num_running))
        what = f"{fault.kind} ({slot}, {num_running} running)"
        _say(f"{at_s:.2f} {len(self.happened):3} {what}")
        if undo:
            self._undos.append((time.monotonic() + fault.hold_s, undo))

    def _tend(self) -> None:
        """What goes on all the time: mend what is due, start what died, reconcile, plan more."""
        now_s = time.monotonic()
        for due in [due for due in self._undos if due[0] <= now_s]:
            self._undos.remove(due)
            due[1]()
        for slot in self.scene.slots:
            self._revive(slot, now_s)
        if now_s - self._looked_s > 1:
            self._looked_s = now_s
            self._measure_cpu()
            with suppress(FleetError):  # Redis is away
                self.reconciler.look()
                if self._undos or len(self.happened) + len(self.left_out) < self.options.faults:
                    self._keep_queue_filled()
        time.sleep(0.05)

    def _keep_queue_filled(self) -> None:
        if self.run.hints.num_queued(self.reconciler.queue) < 2 * self.options.workers:
            self.plan(BATCH_SIZE * 4 * self.options.workers)

    def _revive(self, slot: str, now_s: float) -> None:
        engine, worker = self.scene.fleet.engines[slot], self.scene.fleet.workers[slot]
        if not engine.is_alive and self._is_due(engine.name, now_s):
            engine.start()
        if not worker.is_alive and self._is_due(worker.name, now_s):
            was_told = self.scene.leaving.pop(slot, None) is not None
            self.exit_codes.append((was_told, worker.wait(1)))
            worker.start()

    def _is_due(self, name: str, now_s: float) -> bool:
        died_s = self._died_s.setdefault(name, now_s)
        if now_s - died_s < RESTART_AFTER_S:
            return False
        del self._died_s[name]
        return True

    def _measure_cpu(self) -> None:
        for worker in self.scene.fleet.workers.values():
            with suppress(psutil.Error):
                times = psutil.Process(worker.child.pid).cpu_times()
                self.cpu_s[worker.child.pid] = times.user + times.system


def islice_rows(seed: int, first: int, count: int) -> Iterator[Json]:
    """Prompts `first` to `first + count` of a seed: short, of mixed length, some of two turns."""
    for number in range(first, first + count):
        dice = random.Random(f"{seed}/{number}")
        words = f"tokens={min(150, max(4, int(dice.expovariate(1 / MEAN_TOKENS))))}"
        messages = [{"role": "user", "content": f"{words} prompt {number} first"}]
        if dice.random() < 0.1:
            messages.append({"role": "user", "content": f"{words} prompt {number} second"})
        yield {"id": f"p{number}", "messages": messages}


def hold(options: Options, folder: Path) -> Report:
    """The whole campaign in `folder`, which keeps all logs."""
    faults = schedule.draw(options.seed, options.faults, options.workers, options.faults_s)
    for fault in faults:
        _say(f"  {fault.at_s:7.2f} s  {fault.kind}, victim {fault.victim}, {fault.hold_s} s")
    s3, login = start_s3(folder, BUCKET)
    try:
        model_dir = make_tiny_model(folder / "tiny")
        place = Place(folder, model_dir, login, BUCKET)
        clocks = [_clock(folder, name) for name in ("redis", "workers")]
        with Fleet(
            place,
            f"campaign-{uuid.uuid4().hex[:8]}",
            token_s=options.token_s,
            redis_clock=clocks[0],
            workers_clock=clocks[1],
        ) as fleet:
            return _hold(options, fleet, faults)
    finally:
        s3.stop(0)


def _hold(options: Options, fleet: Fleet, faults: list[Fault]) -> Report:
    slots = [f"w{number}" for number in range(options.workers)]
    name = f"seed-{options.seed}"
    run_options = RunOptions(max_new_tokens=256)
    settings = fleet.settings_direct(name)
    with Run.create(settings, fleet.place.model_dir, run_options) as run:
        scene = Scene(fleet, slots, options.max_in_flight)
        campaign = Campaign(options, scene, run, run.reconciler())
        campaign.plan(options.prompts)
        for slot in slots:
            fleet.engine(slot)
            values = dataclasses.replace(
                fleet.settings(name),
                engine_url=fleet.engines[slot].url,
                max_in_flight=options.max_in_flight,
            )
            fleet.make_worker(slot, values, module=LONG).start()
        until_full = time.monotonic() + 60
        while not all(map(scene.is_full, range(options.workers))):
            assert time.monotonic() < until_full, fleet.logs()
            time.sleep(0.1)
        campaign.started_s = time.monotonic()
        campaign.meet(faults)
        _say(f"{len(campaign.happened)} faults are over, {campaign.num_prompts} prompts planned")
        campaign.finish()
        return verdict.judge(campaign)


def _clock(folder: Path, name: str) -> Clock | None:
    try:
        return Clock(folder, name)
    except FileNotFoundError as error:
        _say(str(error))
        return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="for logs; kept. Default: a temporary one")
    flags = vars(parser.parse_args())
    as_json, folder = flags.pop("json"), flags.pop("folder")
    folder = folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = hold(Options(**flags), folder)
    print(orjson.dumps(report.facts()).decode() if as_json else report.text())
    sys.exit(3 if report.broken_laws else 0)


if __name__ == "__main__":
    main()
