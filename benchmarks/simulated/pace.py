"""How long a simulated engine's work takes: prefill by its tokens, a decode step by who runs.

Asked by schedule.py. Steps are a table by the number of running requests, interpolated between its
rows; a drafter changes what a step costs and how many tokens it brings.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class Drafter:
    """A pretended one: `simulated.json` in its folder."""

    accept_length: float  # tokens of a verify step
    step_cost: float  # of a verify step, over a plain one
    step_cost_per_request: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> Drafter:
        """Raises KeyError where the drafter is one that can't be loaded."""
        facts = orjson.loads((folder / "simulated.json").read_bytes())
        return cls(facts["accept_length"], facts["step_cost"], facts["step_cost_per_request"])

    def step_factor(self, num_running: int) -> float:
        """Seconds of a token over those without a drafter."""
        cost = self.step_cost + self.step_cost_per_request * num_running
        return cost / self.accept_length


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts are read in batches, between which and during which nothing is decoded."""

    tokens_per_s: float = 0.0  # 0: it takes no time at all
    base_s: float = 0.0  # of a batch, however small
    chunk_tokens: int = 8192  # a batch's most

    def batch_s(self, num_tokens: int) -> float:
        """Seconds of one batch."""
        return self.base_s + num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Pace:
    """At `time_factor` times its speed."""

    steps: tuple[tuple[int, float], ...]  # running requests, seconds of a step; ascending
    prefill: Prefill = Prefill()
    drafter: Drafter | None = None
    time_factor: float = 1.0

    def step_s(self, num_running: int) -> float:
        """Seconds in which each of them gains one token.

        Before the first row as there; after the last one it goes on as between the last two.
        """
        steps = self.steps
        at = bisect_right(steps, num_running, key=lambda row: row[0]) - 1
        low = min(max(at, 0), max(len(steps) - 2, 0))
        (num_low, low_s), (num_high, high_s) = steps[low], steps[min(low + 1, len(steps) - 1)]
        seconds = low_s
        if num_high > num_low and num_running > num_low:
            seconds += (high_s - low_s) * (num_running - num_low) / (num_high - num_low)
        drafted = self.drafter.step_factor(num_running) if self.drafter else 1.0
        return seconds * drafted / self.time_factor

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of one batch of prompts."""
        if not self.prefill.tokens_per_s:
            return 0.0
        return self.prefill.batch_s(num_tokens) / self.time_factor


def linear_steps(
    base_s: float, per_request_s: float = 0.0, knee: int = 0, collapse: float = 1.0
) -> tuple[tuple[int, float], ...]:
    """Rows of a step that grows evenly; over `knee` requests (0: never) it takes `collapse` times
    as long.
    """

    def at(num_running: int) -> float:
        return base_s + per_request_s * num_running

    if not knee:
        return ((0, at(0)), (1, at(1)))
    over, far = knee + 1, 2 * knee + 2
    return ((0, at(0)), (knee, at(knee)), (over, at(over) * collapse), (far, at(far) * collapse))
