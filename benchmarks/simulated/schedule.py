"""Who runs, who is read in, who waits in a simulated engine, and how far each has come.

Asked by engine.py; it knows no clock but the times that it is told, and nothing of HTTP. All
running requests gain tokens at one pace, so that one counter, tokens gained since the start, says
how far each is: an event stands at a value of that counter, and costs the same whoever runs
beside. Events happen at their own time, however late the caller looks: what a request got doesn't
depend on the machine's load. As SGLang does: first come, first served; a batch of prompts is read
before anything is decoded; when the tokens' memory is full, who came last goes back to the queue,
and is read in again with what it had.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from benchmarks.simulated.pace import Pace

# Of the tokens' memory, from where on nobody is let in: who runs needs room to grow, or would be
# sent back at once.
FULL_SHARE = 0.9
_NEAR = 1e-3  # tokens by which an event may seem to come later than it does

# How a request ends.
STOP, LENGTH, ABORT, LEFT, DIED = "stop", "length", "abort", "left", "died"


@dataclass(eq=False, slots=True)
class Job:
    """One request."""

    num_input: int  # ids
    num_wanted: int  # ids, until it ends
    ending: str  # how, then: stop | length
    stream_every: int = 0  # ids; 0: its client hears of the end alone
    num_kept: int = 0  # ids made before `base`
    base: float = 0.0  # the counter when it came, or came back
    to_read: int = 0  # ids of a prompt that is being read
    next_word: int = 1  # ids at which its client hears of it
    due: float = math.inf  # the counter at which it does, or ends
    first_s: float | None = None  # its first token
    moved_s: float | None = None  # its last
    outcome: str = ""  # once it is over
    hear: Callable[[], None] | None = None  # called when its client hears of it

    @property
    def num_held(self) -> int:
        """Ids in memory where it comes in."""
        return self.num_input + self.num_kept


class Schedule:
    """One engine's. Times are seconds of one clock, never falling."""

    def __init__(self, pace: Pace, max_running: int, kv_tokens: int = 0) -> None:
        self.num_tokens = 0.0
        self.slot_seconds = 0.0
        self.num_retracted = 0
        self.at_s = 0.0
        self.is_paused = False
        self.waiting: deque[Job] = deque()
        self._pace, self._max_running = pace, max_running
        self._kv_tokens: float = kv_tokens or math.inf
        self._step_s = [pace.step_s(number) for number in range(max_running + 1)]
        self._running: dict[Job, None] = {}  # in the order in which they came
        self._reading: dict[Job, None] = {}
        self._batch: list[tuple[Job, int]] = []  # with the ids of each in it
        self._batch_end_s = 0.0
        self._gained = 0.0
        self._events: list[tuple[float, int, Job]] = []
        self._num_events = 0
        self._held = 0.0  # by running ones, but `_gained` for each of them

    @property
    def num_running(self) -> int:
        """Those that are read in included."""
        return len(self._running) + len(self._reading)

    @property
    def kv_used(self) -> float:
        """Tokens in memory."""
        read = sum(job.num_held for job in self._reading)
        return self._held + len(self._running) * self._gained + read

    def num_made(self, job: Job) -> int:
        """Ids of it so far."""
        if job not in self._running:
            return job.num_kept
        return min(job.num_kept + int(self._gained - job.base + _NEAR), job.num_wanted)

    def due_s(self) -> float:
        """When the next event is; inf: never, if nobody comes."""
        if self.is_paused:
            return math.inf
        if self._batch:
            return self._batch_end_s
        if not self._running:
            return math.inf
        events = self._events
        while events and events[0][0] != events[0][2].due:
            heappop(events)
        due = min(events[0][0] if events else math.inf, self._full_at())
        num_running = len(self._running)
        return self.at_s + max(due - self._gained, 0.0) * self._step_s[num_running]

    def advance(self, now_s: float) -> None:
        """Let everything happen that is due until now."""
        while (due_s := self.due_s()) <= now_s:
            self._go_to(due_s)
            if self._batch:
                self._end_batch()
            self._happen()
            self._let_in()
        self._go_to(now_s)

    def add(self, job: Job, now_s: float) -> None:
        """Last in line."""
        self.advance(now_s)
        self.waiting.append(job)
        self._let_in()

    def drop(self, job: Job, now_s: float, outcome: str) -> None:
        """End it early. One that is over is left alone."""
        self.advance(now_s)
        if job.outcome:
            return
        if job in self._running:
            self._take_out(job)
        elif job in self._reading:
            del self._reading[job]
        else:
            self.waiting.remove(job)
        self._end(job, outcome)
        self._let_in()

    def jobs(self) -> list[Job]:
        """All that are not over."""
        return [*self._running, *self._reading, *self.waiting]

    def pause(self, now_s: float, is_paused: bool) -> None:
        """Nothing moves, or it goes on."""
        self.advance(now_s)
        self.is_paused = is_paused
        self._let_in()

    def _go_to(self, at_s: float) -> None:
        seconds = max(at_s - self.at_s, 0.0)
        self.at_s = max(at_s, self.at_s)
        if self.is_paused:
            self._batch_end_s += seconds
            return
        self.slot_seconds += self.num_running * seconds
        num_running = len(self._running)
        if num_running and not self._batch:
            gained = seconds / self._step_s[num_running]
            self._gained += gained
            self.num_tokens += num_running * gained

    def _happen(self) -> None:
        """What stands at the counter's value."""
        events, reached = self._events, self._gained + _NEAR
        while events and events[0][0] <= reached:
            due, _, job = heappop(events)
            if due == job.due:
                self._hear(job)
        if self._full_at() <= reached:
            self._retract()

    def _hear(self, job: Job) -> None:
        """It has come to its end or to its next word."""
        num_made = self.num_made(job)
        if num_made >= job.num_wanted:
            self._take_out(job)
            self._end(job, job.ending)
            return
        while job.next_word <= num_made:
            job.next_word += job.stream_every
        self._expect(job)
        if job.hear is not None:
            job.hear()

    def _expect(self, job: Job) -> None:
        """Its next event."""
        at = min(job.next_word, job.num_wanted) if job.stream_every else job.num_wanted
        job.due = job.base + at - job.num_kept
        self._num_events += 1
        heappush(self._events, (job.due, self._num_events, job))

    def _let_in(self) -> None:
        """From the queue, and to the next batch of prompts."""
        while self.waiting and self.num_running < self._max_running and self._has_room():
            job = self.waiting.popleft()
            if self._pace.prefill.tokens_per_s:
                job.to_read = job.num_held
                self._reading[job] = None
            else:
                self._join(job, num_sampled=0)
        if self._reading and not self._batch and not self.is_paused:
            self._begin_batch()

    def _has_room(self) -> bool:
        if self._kv_tokens == math.inf or not self.num_running:
            return True
        return self.kv_used + self.waiting[0].num_held <= FULL_SHARE * self._kv_tokens

    def _begin_batch(self) -> None:
        room = self._pace.prefill.chunk_tokens
        for job in self._reading:
            if not room:
                break
            self._batch.append((job, min(job.to_read, room)))
            room -= min(job.to_read, room)
        num_tokens = sum(number for _, number in self._batch)
        self._batch_end_s = self.at_s + self._pace.prefill_s(num_tokens)

    def _end_batch(self) -> None:
        """Who was read to the end has its first token of it."""
        batch, self._batch = self._batch, []
        for job, number in batch:
            job.to_read -= number
            if not job.to_read and job in self._reading:
                del self._reading[job]
                self.num_tokens += 1
                self._join(job, num_sampled=1)

    def _join(self, job: Job, num_sampled: int) -> None:
        """Those that run."""
        job.base = self._gained - num_sampled
        self._running[job] = None
        self._held += job.num_held - job.base
        if job.first_s is None:
            late_s = 0.0 if num_sampled else self._step_s[len(self._running)]
            job.first_s = self.at_s + late_s
        self._expect(job)

    def _take_out(self, job: Job) -> None:
        """Of those that run."""
        num_made = self.num_made(job)
        self._held -= job.num_held - job.base
        del self._running[job]
        job.num_kept, job.due = num_made, math.inf

    def _end(self, job: Job, outcome: str) -> None:
        job.moved_s = self.at_s
        job.outcome = outcome
        if job.hear is not None:
            job.hear()

    def _full_at(self) -> float:
        """The counter at which memory is full. One alone may have more than there is."""
        num_running = len(self._running)
        if self._kv_tokens == math.inf or num_running < 2:
            return math.inf
        read = sum(job.num_held for job in self._reading)
        return (self._kv_tokens - read - self._held) / num_running

    def _retract(self) -> None:
        """Send who came last back to the queue."""
        job = next(reversed(self._running))
        self._take_out(job)
        self.waiting.appendleft(job)
        self.num_retracted += 1
