"""One promotion: a drafter tried on one engine under live work, then served by all, or by none.

Called by -> cli_promote. Steps: windows before; `try` in the log, and the engine's node changes it
(node/following.py); windows during, judged; `promote` or `reject` in the log; the other engines
change, one at a time. Invariants: a run has one promoter; every decision is an entry that follows
the entry it was based on; however this process ends, the last entry, or the lapse of its lease,
leaves the fleet one drafter.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_workers.contract.errors import FleetError, NotEnough
from dflash_workers.contract.records import Json
from dflash_workers.contract.serving import (
    PROMOTE,
    REJECT,
    TRY,
    WITHDRAW,
    ServingEntry,
    ServingLog,
    Trial,
)
from dflash_workers.promotion.lease import PromoterLease
from dflash_workers.promotion.observing import Fleet
from dflash_workers.promotion.trial import POLL_S, Before, Say, Watched
from dflash_workers.promotion.verdict import Rule

log = logging.getLogger(__name__)

BROKEN_OFF = "its promotion was broken off"


@dataclass(frozen=True, slots=True)
class Patience:
    """With engines that start."""

    change_s: float = 1800.0  # for one engine to serve another drafter: drained, started, ready
    follow_s: float = 60.0  # for any engine of the run to be seen


@dataclass(frozen=True, slots=True)
class Decision:
    """How a promotion ended."""

    entry: ServingEntry
    is_promoted: bool
    why: str


class Promoter:
    """Of one run."""

    def __init__(
        self,
        serving: ServingLog,
        fleet: Fleet,
        open_lease: Callable[[], PromoterLease],
        *,
        run: str,
        patience: Patience,
        say: Say,
    ) -> None:
        self._serving = serving
        self._fleet = fleet
        self._open_lease = open_lease
        self._run = run
        self._patience = patience
        self._say = say

    def promote(self, drafter: str, rule: Rule, slot: str = "") -> Decision:
        """Try a drafter on the engine of `slot`, or the first that serves, and decide.

        Raises Conflict where another promotion is on, NotEnough where no engine follows, or too
        little work comes to tell anything before the trial.
        """
        with self._open_lease() as lease:
            entry = self._last_without_trial()
            if entry.drafter == drafter:
                return Decision(entry, True, "it is served already")
            watched = Watched(
                *(self._fleet, self._run, slot or self._choose_slot(), rule),
                say=self._say,
                check=lease.check,
            )
            before = watched.before()
            entry = self._append(entry, TRY, entry.drafter, trial=Trial(drafter, watched.slot))
            try:
                decision = self._decide(entry, drafter, watched, before)
            except BaseException:  # Ctrl-C, or Redis or S3 are gone: the trial must not outlast us
                self._give_up(entry)
                raise
            return self._see_through(decision, lease) if decision.is_promoted else decision

    def order(self, drafter: str) -> ServingEntry:
        """`drafter`, or none, for the whole fleet, without a trial."""
        with self._open_lease():
            entry = self._last_without_trial()
            action = PROMOTE if drafter else WITHDRAW
            return self._append(entry, action, drafter, {"why": "ordered, not tried"})

    def _decide(
        self, entry: ServingEntry, drafter: str, watched: Watched, before: Before
    ) -> Decision:
        if why := watched.wait_for(drafter, entry.number, self._patience.change_s):
            return self._reject(entry, entry.drafter, drafter, why)
        verdict = watched.during(drafter, before)
        if not verdict.is_faster:
            return self._reject(entry, entry.drafter, drafter, verdict.why, verdict.evidence)
        evidence = verdict.evidence | {"why": verdict.why}
        return Decision(self._append(entry, PROMOTE, drafter, evidence), True, verdict.why)

    def _see_through(self, decision: Decision, lease: PromoterLease) -> Decision:
        """Until every engine serves it. Where one can't, all go back to what they served."""
        entry, drafter = decision.entry, decision.entry.drafter
        deadline = time.monotonic() + self._patience.change_s
        while time.monotonic() < deadline:
            lease.check()
            served = self._fleet.served(self._run)
            broken = sorted(
                slot
                for slot, engine in served.items()
                if engine.entry >= entry.number and drafter in engine.why_not
            )
            if broken:
                why = f"{broken[0]} can't serve it: {served[broken[0]].why_not[drafter]}"
                former = self._serving.history()[entry.number - 1].drafter
                return self._reject(entry, former, drafter, why)
            if served and all(s.is_ready and s.drafter == drafter for s in served.values()):
                self._say(f"all {len(served)} engines serve {drafter}")
                return decision
            time.sleep(POLL_S)
        self._say("some engines have not changed yet: they go on by themselves")
        return decision

    def _choose_slot(self) -> str:
        deadline = time.monotonic() + self._patience.follow_s
        while time.monotonic() < deadline:
            served, beats = self._fleet.served(self._run), self._fleet.beats()
            if ready := sorted(slot for slot in served if served[slot].is_ready and slot in beats):
                return ready[0]
            time.sleep(POLL_S)
        raise NotEnough(
            f"no engine of run {self._run!r} follows promotions: start `dflash-fleet node` "
            "without --drafter and without the presets dflash and mtp"
        )

    def _last_without_trial(self) -> ServingEntry:
        """A trial that is open still was a promoter's who is gone, for we have the lease."""
        entry = self._serving.last()
        if entry.trial is None:
            return entry
        return self._reject(entry, entry.drafter, entry.trial.drafter, BROKEN_OFF).entry

    def _give_up(self, entry: ServingEntry) -> None:
        assert entry.trial is not None
        try:
            self._reject(entry, entry.drafter, entry.trial.drafter, BROKEN_OFF)
        except FleetError as error:
            log.warning("the trial ends by itself in a minute: %s", error)

    def _reject(
        self,
        entry: ServingEntry,
        served: str,
        refused: str,
        why: str,
        evidence: Json | None = None,
    ) -> Decision:
        facts = (evidence or {}) | {"refused": refused, "why": why}
        return Decision(self._append(entry, REJECT, served, facts), False, why)

    def _append(
        self,
        before: ServingEntry,
        action: str,
        drafter: str,
        evidence: Json | None = None,
        trial: Trial | None = None,
    ) -> ServingEntry:
        entry = self._serving.append(
            before,
            action,
            drafter,
            by=f"{socket.gethostname()}/{os.getpid()}",
            trial=trial,
            evidence=evidence,
        )
        self._say(
            f"trial of {trial.drafter} on {trial.slot}"
            if trial
            else f"{action}: {drafter or 'no drafter'} for the fleet, one engine after the other"
        )
        return entry
