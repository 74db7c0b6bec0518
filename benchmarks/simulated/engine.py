"""One simulated engine: its requests, its mode, what it counts and what it notes.

Served by server.py; schedule.py says how far requests are, answers.py what they get. Everything
happens in one event loop, which is woken when something is due and at no other time.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulated.answers import Answers, Question
from benchmarks.simulated.lengths import LONGEST
from benchmarks.simulated.pace import Pace
from benchmarks.simulated.schedule import ABORT, DIED, LEFT, LENGTH, STOP, Job, Schedule
from benchmarks.simulated.token_log import TokenLog
from dflash_workers.contract.records import Json

OK, FAILING, HANGING, UNHEALTHY, DEAD = "ok", "500", "hang", "unhealthy", "dead"
MODES = (OK, FAILING, HANGING, UNHEALTHY)
_TOGETHER_S = 2e-3  # what happens within it costs one wake-up


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what runs at once."""

    max_running: int = 48
    kv_tokens: int = 0  # 0: none


@dataclass(eq=False, slots=True)
class Request:
    """One, as its client asked it."""

    rid: str
    question: Question
    job: Job
    started_s: float  # since the epoch
    stops_with: int | None  # the id that its whole answer ends in
    tell: Callable[[Request], None]

    def hear(self) -> None:
        """Pass it on."""
        self.tell(self)


class Engine:
    """Made and used inside one event loop."""

    def __init__(
        self, name: str, answers: Answers, pace: Pace, limits: Limits, log: TokenLog
    ) -> None:
        self.name = name
        self.pace, self.limits = pace, limits
        self.mode = OK
        self._answers, self._log = answers, log
        self._requests: dict[str, Request] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._wake_s = math.inf
        self.begin_life()

    def begin_life(self) -> None:
        """Empty, as a process that starts."""
        self.schedule = Schedule(self.pace, self.limits.max_running, self.limits.kv_tokens)
        self.schedule.at_s = time.monotonic()
        self.num_asked = self.num_finished = self.num_input = 0
        self.first_s = 0.0  # when it was asked first; monotonic
        self.life = uuid.uuid4().hex

    def request(self, asked: Json, tell: Callable[[Request], None]) -> Request:
        """One that may begin. `tell` is called whenever its client is to hear of it."""
        sampling = asked["sampling_params"]
        question = self._answers.question_of(asked["input_ids"])
        end, ending, stops_with = self._end_of(question, sampling)
        job = Job(
            num_input=len(asked["input_ids"]),
            num_wanted=end - question.num_given,
            ending=ending,
            stream_every=sampling.get("stream_interval", 1) if asked.get("stream") else 0,
        )
        rid = asked.get("rid") or uuid.uuid4().hex
        return Request(rid, question, job, time.time(), stops_with, tell)

    def begin(self, request: Request) -> None:
        """Queue it. Whoever is told that it is over ends it."""
        now_s = time.monotonic()
        self.num_asked += 1
        self.num_input += request.job.num_input
        self.first_s = self.first_s or now_s
        self._requests[request.rid] = request
        self._log.note(self._begun(request))
        request.job.hear = request.hear
        self.schedule.add(request.job, now_s)
        self._arm()

    def end(self, request: Request) -> None:
        """One that is over."""
        request.job.hear = None  # a circle, which would wait for the collector of them
        if self._requests.get(request.rid) is request:
            del self._requests[request.rid]
        self.num_finished += request.job.outcome == request.job.ending
        self._log.note(self._begun(request) | self._ended(request))

    def leave(self, request: Request) -> None:
        """Its client is gone, and hears of nothing any more."""
        self._lose(request, LEFT)
        self._arm()

    def look(self) -> None:
        """Let what is due happen, before somebody reads the counts."""
        self.schedule.advance(time.monotonic())
        self._arm()

    def abort(self, rid: str) -> None:
        """One request; an unknown one is left alone."""
        if request := self._requests.get(rid):
            self.schedule.drop(request.job, time.monotonic(), ABORT)
            self._arm()

    def abort_all(self) -> None:
        for rid in list(self._requests):
            self.abort(rid)

    def set_mode(self, mode: str) -> None:
        """One of MODES."""
        self.mode = mode
        self.schedule.pause(time.monotonic(), mode == HANGING)
        self._note_mode()
        self._arm()

    def die(self) -> None:
        """All requests are lost, and nobody is told."""
        for request in list(self._requests.values()):
            self._lose(request, DIED)
        self.mode = DEAD
        self._note_mode()

    def revive(self) -> None:
        """Back, and empty."""
        self.begin_life()
        self.set_mode(OK)

    def running(self) -> dict[str, int]:
        """Place in the whole answer, by request."""
        self.look()
        return {
            request.rid: request.question.num_given + self.schedule.num_made(request.job)
            for request in self._requests.values()
        }

    def _lose(self, request: Request, outcome: str) -> None:
        """Whatever it gets until now is told to nobody, its end neither."""
        request.job.hear = None
        self.schedule.drop(request.job, time.monotonic(), outcome)
        request.job.outcome = outcome
        self.end(request)

    def _end_of(self, question: Question, sampling: Json) -> tuple[int, str, int | None]:
        """The place at which it will end, how, and the id that stops it."""
        limit = min(question.num_given + sampling["max_new_tokens"], LONGEST)
        ignores = bool(sampling.get("ignore_eos"))
        # What was given to its end gets the stop id: nothing at all would be no answer.
        whole = max(question.num_ids, question.num_given + 1)
        letters = limit if ignores else min(whole - 1, limit)
        stop_ids = set(sampling.get("stop_token_ids") or ())
        if place := self._answers.first_stop(question, stop_ids, letters):
            return place, STOP, self._answers.id_at(question, place - 1)
        if ignores or limit < whole:
            return limit, LENGTH, None
        return whole, STOP, self._answers.stop_id

    def _arm(self) -> None:
        """Be woken after the next event. A timer that comes too early arms the next one."""
        due_s = self.schedule.due_s() + _TOGETHER_S
        if due_s >= self._wake_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_s = due_s
        self._timer = self._loop.call_later(due_s - time.monotonic(), self._wake)

    def _wake(self) -> None:
        self._timer, self._wake_s = None, math.inf
        self.look()

    def _begun(self, request: Request) -> Json:
        return {
            "engine": self.name,
            "rid": request.rid,
            "question": request.question.name,
            "num_given": request.question.num_given,
            "started_s": request.started_s,
        }

    def _ended(self, request: Request) -> Json:
        job, to_epoch_s = request.job, time.time() - time.monotonic()
        has_any = job.num_kept > 0 and job.first_s is not None
        moved_s = job.moved_s if has_any else None
        return {
            "first_s": job.first_s + to_epoch_s if has_any and job.first_s is not None else None,
            "moved_s": moved_s + to_epoch_s if moved_s is not None else request.started_s,
            "end": request.question.num_given + job.num_kept,
            "outcome": job.outcome,
        }

    def _note_mode(self) -> None:
        self._log.note({"engine": self.name, "mode": self.mode, "at_s": time.time()})
