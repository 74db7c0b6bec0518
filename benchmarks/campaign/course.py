"""The course of a campaign: what happens from its start to the last commit.

Run by __main__.py; faults come from schedule.py and are done by injections.py. Whoever dies is
started again after a while, as a supervisor would; somebody reconciles, as an operator's cron
would; more is planned while faults are to come and the queue runs low. What happened is judged
afterwards by verdict.py. Nothing here grows with the number of prompts but the reconciler's list of
batches without a commit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.campaign import kinds
from benchmarks.campaign.configuration import Configuration
from benchmarks.campaign.fleet import Fleet
from benchmarks.campaign.injections import Scene, Undo, inject
from benchmarks.campaign.planning import Producer
from benchmarks.campaign.reasons import Happened
from benchmarks.campaign.saying import say
from benchmarks.campaign.schedule import Fault
from benchmarks.campaign.views import Views
from dflash_workers.contract.errors import FleetError, NotEnough
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.terminal import ExitCode
from dflash_workers.worker import batches_at_once
from producer.api import Run
from producer.reconcile import Reconciler

PRECONDITION_S = 30.0  # a fault that can't happen for so long takes another victim, or is left out
LATE = 2.0  # so many times as long as planned, and what is left of the faults is left out
TICK_S = 0.05
LOOK_EVERY_S = 1.0
REST = 20.0  # of the time: a look at S3 may take one part in so many
SAY_EVERY_S = 10.0
AFTERMATH_S = 10.0  # a worker that started beside a broken Redis or S3 may find out so late
WARM_FROM = 0.05  # of the prompts: what a process takes to start is none of theirs


@dataclass
class Course:
    """One campaign, while it runs."""

    fleet: Fleet
    run: Run
    reconciler: Reconciler
    producer: Producer
    views: Views
    scene: Scene
    zero_s: float = field(default_factory=time.monotonic)  # the first worker's start
    zero_at: float = field(default_factory=time.time)  # the same moment, by the wall clock
    happened: list[Happened] = field(default_factory=list)
    left_out: list[Fault] = field(default_factory=list)
    goodbyes: list[int] = field(default_factory=list)  # exit codes of workers that were told to go
    crashed: list[tuple[str, int]] = field(default_factory=list)  # workers that no fault ended
    longest_look_s: float = 0.0  # of the reconciler
    timed: dict[str, float] = field(default_factory=dict)  # seconds that a command took, by name
    done_s: float = 0.0  # from zero_s to the last commit; 0: it never came
    _undos: list[tuple[float, Undo]] = field(default_factory=list)
    _died_s: dict[str, float] = field(default_factory=dict)
    _num_joined: int = 0
    _is_over: bool = False  # no fault is to come
    _shared_until_s: float = 0.0  # what all lean on was broken until then
    _ended: set[str] = field(default_factory=set)  # slots whose worker a fault has ended
    _due_s: dict[str, float] = field(default_factory=dict)

    @property
    def configuration(self) -> Configuration:
        return self.fleet.configuration

    def hold(self, faults: list[Fault]) -> bool:
        """All of it; False where it never came to its end."""
        self.producer.add(self.configuration.prompts.count)
        self.fleet.start_tokenizers()
        self._join()
        if faults:
            self._wait_until_full()
            self._meet_all(faults)
        self._is_over = True
        return self._finish()

    def _wait_until_full(self) -> None:
        first = range(self._num_joined)
        deadline = time.monotonic() + self.configuration.bounds.start_s
        while not all(map(self.scene.is_full, first)):
            if time.monotonic() > deadline:
                raise NotEnough(f"the engines were never full\n{self.fleet.logs()}")
            self._tend()

    def _meet_all(self, faults: list[Fault]) -> None:
        """Every fault in turn, and then peace."""
        began_s = time.monotonic()
        latest_s = began_s + LATE * faults[-1].at_s + PRECONDITION_S
        for fault in faults:
            while time.monotonic() < began_s + fault.at_s:
                self._tend()
            if time.monotonic() > latest_s:
                self.left_out.append(fault)
            else:
                self._meet(fault)
        while self._undos:
            self._tend()
        say(f"{len(self.happened)} faults are over, {self.producer.num_prompts} prompts planned")

    def _finish(self) -> bool:
        """Until every batch is committed."""
        deadline = time.monotonic() + self.configuration.bounds.finish_s
        is_sealed = False
        while time.monotonic() < deadline:
            self._tend()
            if self.producer.is_busy or not self._is_due("finish", LOOK_EVERY_S):
                continue
            if not is_sealed:
                self.run.seal()
                is_sealed = True
            if not self.done_s and self._is_done():
                self.done_s = time.monotonic() - self.zero_s
            if self.done_s and self._has_shards():
                return True
        return False

    def _is_done(self) -> bool:
        with self._rarely("finish"):
            self.reconciler.ledger.refresh()
        return not self.reconciler.ledger.open

    def _has_shards(self) -> bool:
        """Whether the tokenizers, if there are any, have made all that they can."""
        if not self.fleet.tokenizers:
            return True
        with self._rarely("finish"):
            keys = RunKeys(self.run.spec.run)
            num_shards = sum(1 for _ in self.run.store.list(keys.tokens))
        return num_shards >= self.reconciler.ledger.num_batches

    @contextmanager
    def _rarely(self, what: str) -> Iterator[None]:
        """What takes long is due again only after a rest."""
        began_s = time.monotonic()
        yield
        now_s = time.monotonic()
        self._due_s[what] = now_s + max(LOOK_EVERY_S, REST * (now_s - began_s))

    def _meet(self, fault: Fault) -> None:
        chosen = self._with_victim(fault)
        if chosen is None:
            self.left_out.append(fault)
            say(f"left out: {fault.kind}: nothing it could hit")
            return
        slot = self.fleet.slots[chosen.victim]
        num_running = len(self.fleet.engines.running(chosen.victim))
        at_s = time.time()
        if chosen.kind in kinds.WORKERS_GO:
            self._ended.add(slot)
        if chosen.kind in kinds.SHARED:
            self._shared_until_s = time.monotonic() + chosen.hold_s + AFTERMATH_S
        undo = inject(self.scene, chosen)
        self.happened.append(Happened(chosen.kind, slot, at_s, chosen.hold_s, num_running))
        say(f"{len(self.happened):4} {chosen.kind} ({slot}, {num_running} running)")
        if undo:
            self._undos.append((time.monotonic() + chosen.hold_s, undo))

    def _with_victim(self, fault: Fault) -> Fault | None:
        """The fault as it may happen now, with another victim where its own can't be hit."""
        deadline = time.monotonic() + PRECONDITION_S
        while not self.scene.may_happen(fault, fault.victim):
            self._tend()
            if time.monotonic() > deadline:
                numbers = range(len(self.fleet.slots))
                others = (number for number in numbers if self.scene.may_happen(fault, number))
                other = next(others, None)
                return None if other is None else dataclasses.replace(fault, victim=other)
        return fault

    def _tend(self) -> None:
        """What goes on all the time: mend what is due, start what died, reconcile, plan more."""
        now_s = time.monotonic()
        for due in [due for due in self._undos if due[0] <= now_s]:
            self._undos.remove(due)
            due[1]()
        self._join()
        for number in range(self._num_joined):
            self._revive(number, now_s)
        self.producer.tend()
        if self._is_due("look", LOOK_EVERY_S):
            with suppress(FleetError):  # Redis or S3 is away
                self._look()
        if self._is_due("say", SAY_EVERY_S):
            say(self.views.line(self.producer.num_prompts))
        time.sleep(TICK_S)

    def _look(self) -> None:
        self.fleet.watch_children_of_tokenizers()
        if self.views.num_done >= WARM_FROM * self.configuration.prompts.count:
            self.fleet.watch.begin(self.views.num_done)
        if self.fleet.s3_proxy:
            self.fleet.s3_proxy.requests.clear()
        if self._is_due("reconcile", LOOK_EVERY_S):
            began_s = time.monotonic()
            with self._rarely("reconcile"):
                self.reconciler.look()
            self.longest_look_s = max(self.longest_look_s, time.monotonic() - began_s)
        if self._is_low() and not self._is_over and not self.producer.is_busy:
            self.producer.add(self.configuration.prompts.add_at_once)

    def _is_low(self) -> bool:
        """Whether too few batches wait: by the queue, which a flush empties, and by the plan."""
        prompts, workers = self.configuration.prompts, self.configuration.workers
        num_open = (self.producer.num_prompts - self.views.num_done) / prompts.batch_size
        num_held = workers.count * batches_at_once(prompts.batch_size, workers.in_flight)
        num_wanted = prompts.keep_waiting
        return self.views.num_queued < num_wanted and num_open < num_wanted + num_held

    def _join(self) -> None:
        """Workers whose time has come."""
        elapsed_s = time.monotonic() - self.zero_s
        joins = self.configuration.workers.joins
        wanted = sum(join.count for join in joins if join.at_s <= elapsed_s)
        for number in range(self._num_joined, wanted):
            self.fleet.start_worker(number)
        self._num_joined = max(self._num_joined, wanted)

    def _revive(self, number: int, now_s: float) -> None:
        slot = self.fleet.slots[number]
        worker = self.fleet.workers[slot]
        if worker.is_alive:
            return
        died_s = self._died_s.setdefault(slot, now_s)
        if now_s - died_s >= self.configuration.workers.restart_after_s:
            del self._died_s[slot]
            code = worker.wait(1)
            if slot in self.scene.leaving:
                self.scene.leaving.discard(slot)
                self.goodbyes.append(code)
            elif slot not in self._ended and not self._could_not_start(code, died_s):
                self.crashed.append((slot, code))
                say(f"{slot} died by itself with {code}\n{worker.tail(15)}")
            self._ended.discard(slot)
            self.fleet.start_worker(number)

    def _could_not_start(self, code: int, died_s: float) -> bool:
        """Whether it says so, in one line and with 1, while what all lean on was broken: whoever
        runs it starts it again.
        """
        return code == ExitCode.COULD_NOT and died_s < self._shared_until_s

    def _is_due(self, what: str, every_s: float) -> bool:
        """Whether its time has come; the next one is `every_s` later."""
        now_s = time.monotonic()
        if now_s < self._due_s.get(what, 0.0):
            return False
        self._due_s[what] = now_s + every_s
        return True
