"""What a step was, put together for all who watch it.

Between train.py, which has the numbers, and watching.py, which shows them. On the leader only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from trainer.online.checkpoint import TrainState
from trainer.online.step import StepMetrics
from trainer.online.watching import StepRecord, Watcher, starving_side

OnStep = Callable[[StepRecord], None]


class Recorder:
    """Makes a StepRecord of each step, hands it to every watcher and last to `on_step`."""

    def __init__(self, watchers: list[Watcher], on_step: OnStep, peak: float | None) -> None:
        """`peak`: operations a second of all chips together; None: unknown."""
        self._watchers = watchers
        self._on_step = on_step
        self._peak = peak
        self._began = time.perf_counter()

    def note(
        self,
        state: TrainState,
        metrics: StepMetrics,
        seconds: dict[str, float],
        *,
        starved_s: float,
        sender_wait_s: float,
    ) -> None:
        """`state`: after the step; `seconds`: by phase; `sender_wait_s`: of all targets."""
        now = time.perf_counter()
        took_s, self._began = now - self._began, now
        record = StepRecord(
            at=time.time(),
            step=state.step,
            num_steps=state.num_steps,
            loss=metrics.loss,
            accept_length=metrics.accept_length,
            measured_accept_length=state.accept_length,
            accuracy_by_place=metrics.accuracy_by_place,
            entropy=metrics.entropy,
            gradient_norm=metrics.gradient_norm,
            learning_rate=metrics.learning_rate,
            num_tokens=metrics.num_tokens,
            tokens_per_s=metrics.num_tokens / took_s,
            mfu=metrics.work / took_s / self._peak if self._peak else None,
            seconds=seconds,
            starved_s=starved_s,
            starving=starving_side(seconds, sender_wait_s),
        )
        for watcher in self._watchers:
            watcher.see(record)
        self._on_step(record)

    def close(self) -> None:
        with ExitStack() as closed:
            for watcher in self._watchers:
                closed.enter_context(closing(watcher))
