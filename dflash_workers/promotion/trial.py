"""A trial as it is watched: windows before, the engine changed, windows during, looks at both.

Made by -> promoter, which draws the consequences. Says what it waits for, because a trial takes a
quarter of an hour. Only windows in which engines were full count: the fleet's real concurrency is
where a drafter must pay, and one that gains at 4 streams may lose at 48.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.records import Json
from dflash_workers.promotion.observing import Fleet, Window, watch
from dflash_workers.promotion.verdict import Gain, Outcome, Rule, estimate_gain, judge

POLL_S = 1.0
MAX_MISSED = 3  # times the windows that are needed, one after the other: then it is over

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended, and on what."""

    is_faster: bool
    why: str
    evidence: Json


@dataclass(frozen=True, slots=True)
class Before:
    """What was served before a trial, and which engines it was held against."""

    log_ratios: list[float]
    against: frozenset[str]


@dataclass(frozen=True, slots=True)
class Watched:
    """One engine, held against the others of its run."""

    fleet: Fleet
    run: str
    slot: str
    rule: Rule
    say: Say
    check: Callable[[], None]  # raises where the trial is ours no more

    def before(self) -> Before:
        """What is served now, in windows. Raises NotEnough where there is too little work."""
        self.say(f"{self.slot} is watched as it is")
        num_wanted = 2 * self.rule.min_windows  # of the two samples, the one that costs nothing
        deadline = time.monotonic() + self.rule.max_s
        by_others: dict[frozenset[str], list[float]] = {}
        while time.monotonic() < deadline:
            for window in self._next_windows(""):
                found = by_others.setdefault(window.against, [])
                found.append(window.log_ratio)
                if len(found) == num_wanted:
                    return Before(found, window.against)
        most = max(map(len, by_others.values()), default=0)
        raise NotEnough(
            f"{self.slot} was full in {most} of the {num_wanted} windows of "
            f"{self.rule.window_s:g} s beside the same engines: is there enough work queued?"
        )

    def wait_for(self, drafter: str, entry: int, timeout_s: float) -> str:
        """Until the engine serves it, as an entry of the log says; else why it can't."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            served = self.fleet.served(self.run).get(self.slot)
            if served and served.entry >= entry and drafter in served.why_not:
                return served.why_not[drafter]
            is_serving = served and served.is_ready and served.drafter == drafter
            if is_serving and self.slot in self.fleet.beats():
                return ""
            time.sleep(POLL_S)
        return f"not ready within {timeout_s:g} s"

    def during(self, drafter: str, before: Before) -> Verdict:
        """Look until it is decided. Engines that come and go would move the ratio more than any
        drafter: windows beside others than before don't count."""
        time.sleep(self.rule.settle_s)
        deadline = time.monotonic() + self.rule.max_s
        windows: list[Window] = []
        num_looked = num_missed = 0
        gain: Gain | None = None
        while time.monotonic() < deadline:
            served = self.fleet.served(self.run).get(self.slot)
            if served and drafter in served.why_not:
                return self._verdict(False, served.why_not[drafter], gain, windows)
            found = [w for w in self._next_windows(drafter) if w.against == before.against]
            num_missed = 0 if found else num_missed + 1
            if num_missed > MAX_MISSED * self.rule.min_windows:
                return self._verdict(False, "too little to compare it with", gain, windows)
            windows += found
            if not self._is_look_due(num_looked, windows):
                continue
            num_looked += 1
            gain = estimate_gain(before.log_ratios, [w.log_ratio for w in windows], self.rule)
            self.say(f"look {num_looked} of {self.rule.num_looks}: {in_percent(gain)}")
            outcome = judge(gain, self.rule, is_last=num_looked == self.rule.num_looks)
            if outcome is not Outcome.OPEN:
                return self._verdict(outcome is Outcome.FASTER, outcome, gain, windows)
        return self._verdict(False, "too little work to tell", gain, windows)

    def _is_look_due(self, num_looked: int, windows: list[Window]) -> bool:
        num_requests = sum(window.num_replies for window in windows)
        is_enough = len(windows) >= self.rule.min_windows
        return is_enough and self.rule.is_look_due(num_looked, num_requests)

    def _next_windows(self, drafter: str) -> list[Window]:
        """One, if it counts: during a trial, only while its drafter is what the engine serves."""
        self.check()
        served = self.fleet.served(self.run)
        window = watch(
            self.fleet.beats, self.slot, frozenset(served) - {self.slot}, self.rule.window_s
        )
        mine = served.get(self.slot)
        is_on_trial = not drafter or (mine is not None and mine.drafter == drafter)
        return [window] if window and is_on_trial else []

    def _verdict(
        self, is_faster: bool, why: str, gain: Gain | None, windows: list[Window]
    ) -> Verdict:
        beat = self.fleet.beats().get(self.slot)
        evidence: Json = {
            "slot": self.slot,
            "num_requests": sum(window.num_replies for window in windows),
            "gain": asdict(gain) if gain else None,
            "accept_length": beat.number("accept_length") if beat else None,
            "rule": asdict(self.rule),
        }
        return Verdict(is_faster, f"{why}: {in_percent(gain)}" if gain else why, evidence)


def in_percent(gain: Gain) -> str:
    """For people."""
    return f"{gain.mean:+.1%} tokens/s ({gain.low:+.1%} to {gain.high:+.1%})"
