"""Where a step's time goes, by phase, on a GPU that works behind the program's back.

Held by train.py, handed to whoever does a phase. On a GPU a phase is the time between two events
of its stream, so that nothing waits for the sake of measuring; waiting for data is the program's
own time. Invariant: phases never nest, so that their sum is no more than the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Waiting for a microbatch; the target's forward; waiting for features of another rank, or for one
# to take them; the drafter's forward and backward; the update, with the sum over ranks.
DATA, TARGET, TRANSFER, DRAFTER, OPTIMIZER = "data", "target", "transfer", "drafter", "optimizer"
PHASES = (DATA, TARGET, TRANSFER, DRAFTER, OPTIMIZER)


class Stopwatch:
    """Seconds by phase since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        if self._is_cuda and name != DATA:
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Every phase's seconds; waits for the GPU."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1000
        seconds = {name: self._seconds[name] for name in PHASES}
        self._seconds.clear()
        self._events.clear()
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
