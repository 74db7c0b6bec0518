"""Has this worker gone deaf, or its engine dumb, although every connection looks alive?

Fed by the worker's sweep with plain counts (View), answers what to do (Verdict). Two things are
seen by nothing else: a Celery consumer that is connected and receives nothing (after Redis was
restarted, paused or cut off), and an engine whose /health says 200 while its scheduler is dead.
Only the lack of progress tells, so only progress is looked at. `reconnect` is the cure for the
first, tried before the last resort, which is to exit non-zero and let a supervisor start anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Verdict(Enum):
    """What the worker should do now. All but OK are given once, then again after as long."""

    OK = "ok"
    RECONNECT = "reconnect"  # the consumer is deaf: call `reconnect`
    EXIT = "exit"  # it still is: give the batches back and exit non-zero
    ENGINE_STUCK = "engine stuck"  # it answers nothing: have it started anew


@dataclass(frozen=True, slots=True)
class Limits:
    """How long without progress is too long."""

    # A message waits milliseconds for a free slot, and reconnecting costs a second and no work.
    reconnect_s: float = 20.0
    # After that. Redis calls of the consumer may block for 30 s (celeryconfig's socket_timeout);
    # both together stay below a minute.
    exit_s: float = 35.0
    # Longer than the longest prefill, shorter than SGLang's own watchdog (300 s), which a dead
    # scheduler takes along. Where answers are not streamed: longer than the longest answer.
    engine_s: float = 180.0
    # A process that was stopped for an hour has not waited for an hour.
    longest_step_s: float = 5.0


@dataclass(frozen=True, slots=True)
class View:
    """What the worker sees at one look. Counts are since its start and never fall."""

    num_queued: int | None  # messages waiting; None: Redis didn't say
    wants_more: bool  # a slot is free, and it is neither draining nor kept from taking work
    num_received: int  # messages
    num_running: int  # requests in the engine
    num_replies: int  # of the engine, refusals too
    num_tokens: int  # generated


class Watchdog:
    """For one thread that looks every few seconds."""

    def __init__(self, now_s: float, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._looked_s = now_s
        self._last = View(0, False, 0, 0, 0, 0)
        self._deaf_s = 0.0  # so long a message was due and none came
        self._dumb_s = 0.0  # so long a token was due and none came
        self._has_reconnected = False  # since a message came

    def look(self, view: View, now_s: float) -> Verdict:
        """The verdict of now; `now_s` is of a clock that never goes back."""
        self._note(view, now_s)
        limit_s = self._limits.exit_s if self._has_reconnected else self._limits.reconnect_s
        if self._deaf_s >= limit_s:
            verdict = Verdict.EXIT if self._has_reconnected else Verdict.RECONNECT
            self._has_reconnected, self._deaf_s = True, 0.0
            return verdict
        if self._dumb_s >= self._limits.engine_s:
            self._dumb_s = 0.0
            return Verdict.ENGINE_STUCK
        return Verdict.OK

    def _note(self, view: View, now_s: float) -> None:
        step_s = min(now_s - self._looked_s, self._limits.longest_step_s)
        last, self._last, self._looked_s = self._last, view, now_s
        has_received = view.num_received != last.num_received
        is_due = bool(view.num_queued) and view.wants_more
        self._deaf_s = self._deaf_s + step_s if is_due and not has_received else 0.0
        if has_received:
            self._has_reconnected = False
        has_answered = (view.num_replies, view.num_tokens) != (last.num_replies, last.num_tokens)
        is_asked = view.num_running > 0 and last.num_running > 0
        self._dumb_s = self._dumb_s + step_s if is_asked and not has_answered else 0.0


class Consumer(Protocol):
    """What is used of celery.worker.consumer.Consumer, which is the sender of `worker_ready`."""

    connection: object | None

    def call_soon(self, p: Callable[[], None], /) -> object: ...


def reconnect(consumer: Consumer) -> None:
    """Have a running worker's consumer connect and subscribe anew. From any thread; running tasks
    go on.

    The error is raised inside Celery's event loop, woken for it, and so takes the very way of a
    lost connection. A consumer that is connecting already is left alone.
    """
    deaf = consumer.connection

    def drop() -> None:
        if deaf is not None and consumer.connection is deaf:
            raise ConnectionError("no message came although some wait: connecting anew")

    consumer.call_soon(drop)
