"""One request in the engine, from its first byte to its last id, under our own clock.

Made by engine for each try at a question. An answer that takes longer than a few seconds is
streamed, in few events, even where nobody listens: only new ids tell an engine that works from one
that died behind a healthy /health. So there are three limits: the whole engine silent, this request
silent while others go on, and the last bound of pace.py, which stands alone where a dialect never
streams. Whoever ends a request early gets what was sampled until then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from dflash_workers.contract.errors import EngineUnavailable, FleetError
from dflash_workers.contract.records import Json
from dflash_workers.pace import MIN_WORD_IDS, Pace, Patience
from dflash_workers.questions import Heard, Leaving, Question
from dflash_workers.replies import Reply
from dflash_workers.wire import Wire, excerpt

log = logging.getLogger(__name__)

# Names of requests, no other process's: an engine may have several workers, one after another.
_RIDS = map((uuid.uuid4().hex[:20] + "{:012x}").format, itertools.count())

_LATE_S = 0.25  # a timer that rings later says that this process was stopped, not the engine

# Why a request is given up.
_TOO_LONG = "the answer takes too long"
_STALLED = "no new id in any request"
_LOST = "no new id in a request that had begun"


class Dialect(Protocol):
    """How a kind of server is asked, and how its replies read: see dialects/."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def abort_path(self) -> str: ...  # empty: it has none
    @property
    def health_path(self) -> str: ...
    @property
    def facts_path(self) -> str: ...
    @property
    def can_stream(self) -> bool: ...
    @property
    def takes_ids(self) -> bool: ...
    def ask(self, question: Question, rid: str, stream_every: int, facts: Json) -> Json: ...
    def read(self, body: Json) -> Reply: ...
    def read_facts(self, body: Json) -> Json: ...
    def ask_log_probs(self, input_ids: list[int]) -> Json | None: ...
    def read_log_probs(self, body: Json) -> list[float]: ...


@dataclass(slots=True)
class Progress:
    """What the engine has given so far, over all requests."""

    at_s: float = field(default_factory=time.monotonic)  # the last id
    num_tokens: int = 0
    num_running: int = 0  # requests in it
    stuck: str = ""  # evidence that it gives nothing any more

    def note(self, num_tokens: int) -> None:
        """So many new ids."""
        self.at_s = time.monotonic()
        self.num_tokens += num_tokens
        self.stuck = ""


@dataclass(frozen=True, slots=True)
class Line:
    """The engine, as its requests share it."""

    wire: Wire
    dialect: Dialect
    patience: Patience
    pace: Pace
    progress: Progress

    async def abort(self, rid: str) -> None:
        """End a request. Unknown or ended ones are left alone; a failure is only logged."""
        if self.dialect.abort_path:
            try:
                await self.wire.call(self.dialect.abort_path, self.patience.abort_s, {"rid": rid})
            except FleetError as error:
                log.debug("not aborted: %s", error)

    def read(self, body: bytes) -> Reply:
        """A reply or an event's. Raises what it refuses with; EngineUnavailable where garbled."""
        try:
            value = orjson.loads(body)
            if refusal := self.wire.refusal_in(value):
                raise refusal
            return self.dialect.read(value)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineUnavailable(
                f"the engine's reply is garbled: {error!r}: {excerpt(body)}"
            ) from error


@dataclass(frozen=True, slots=True)
class Ear:
    """Who listens to an answer, and who may end it."""

    leaving: Leaving
    heard: Heard | None = None
    hear_every: int = 0  # ids

    async def pause(self, seconds: float) -> None:
        """Sleep, but not past a goodbye."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leaving.wait()


class Attempt:
    """One request. `output_ids` and `text`: what was streamed so far."""

    def __init__(self, question: Question, ear: Ear, line: Line) -> None:
        self.output_ids: list[int] = []
        self.text = ""
        self._question, self._ear, self._line = question, ear, line
        self._rid = next(_RIDS)
        self._started_s = self._word_s = time.monotonic()
        self._num_heard = 0
        self._limit = asyncio.timeout(None)  # ends the reading, by _look or _hear_out
        self._trouble: EngineUnavailable | None = None  # for which it was given up
        self._aborting: asyncio.Task[None] | None = None
        num_ids, word_ids = question.sampling.max_new_tokens, line.pace.word_ids()
        # Whether a sign of life is due before the last bound: where none is asked for because the
        # whole answer is one, too.
        self._is_followed = line.dialect.can_stream and num_ids > MIN_WORD_IDS
        self._stream_every = 0  # ids; 0: one reply
        if line.dialect.can_stream and (num_ids > word_ids or ear.hear_every):
            self._stream_every = min(ear.hear_every or word_ids, word_ids)

    @property
    def latency_s(self) -> float:
        return time.monotonic() - self._started_s

    async def reply(self, facts: Json) -> Reply | None:
        """The engine's last word; None where it was ended early, with `output_ids` all there is.

        Raises PromptRejected, AccessDenied, EngineUnavailable.
        """
        leaving, is_over = self._ear.leaving, False
        self._look_later()
        leaving.watch(self._hear_out)
        try:
            async with self._limit:
                reply = await self._read(facts)
                is_over = True
                return reply
        except TimeoutError:
            if self._trouble is not None:
                raise self._trouble from None
            return None
        finally:
            leaving.unwatch(self._hear_out)
            self._timer.cancel()
            if self._aborting is not None:
                self._aborting.cancel()
            if not is_over and self._aborting is None:  # a goodbye has aborted it, and can't wait
                await self._line.abort(self._rid)

    def _look_later(self) -> None:
        """One timer, which finds out when it rings whether a word has come since."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(
            loop.time() + max(self._due_s() - time.monotonic(), 0), self._look
        )

    def _look(self, is_second: bool = False) -> None:
        if time.monotonic() < self._due_s():
            self._look_later()
            return
        loop = asyncio.get_running_loop()
        if not is_second and loop.time() - self._timer.when() > _LATE_S:
            # We stood still ourselves: what has come meanwhile isn't read yet.
            self._timer = loop.call_later(_LATE_S, self._look, True)
            return
        self._trouble = self._give_up()
        self._limit.reschedule(asyncio.get_running_loop().time())

    def _hear_out(self) -> None:
        """Abort the request, and give it the time to say how far it came."""
        if self._trouble is not None:
            return
        self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._aborting = loop.create_task(self._line.abort(self._rid))
        self._limit.reschedule(loop.time() + self._line.patience.abort_s)

    async def _read(self, facts: Json) -> Reply | None:
        line, dialect = self._line, self._line.dialect
        asked = dialect.ask(self._question, self._rid, self._stream_every, facts)
        if not self._stream_every:
            reply = line.read(await line.wire.call(dialect.path, None, asked))
            line.progress.note(len(reply.output_ids or []) or reply.num_output)
            return reply
        async with aclosing(line.wire.events(dialect.path, None, asked)) as events:
            async for event in events:
                reply = line.read(event)
                self._take(reply)
                if reply.finish:
                    return dataclasses.replace(reply, output_ids=self.output_ids, text=self.text)
                if not self._is_wanted():
                    await line.abort(self._rid)
                    return None
        ended = f"engine at {line.wire.url}: its stream ended within the answer"
        raise EngineUnavailable(ended) from EOFError()  # which is a connection that broke off

    def _take(self, reply: Reply) -> None:
        """An event holds the whole output so far, or with SGLang's --incremental-streaming-output
        what is new.
        """
        ids, text = reply.output_ids or [], reply.text or ""
        if self.output_ids and len(self.output_ids) + len(ids) == reply.num_output:
            ids, text = self.output_ids + ids, self.text + text
        if len(ids) > len(self.output_ids):
            self._word_s = time.monotonic()
            self._line.progress.note(len(ids) - len(self.output_ids))
            self._question.growth.note()
        self.output_ids, self.text = ids, text

    def _is_wanted(self) -> bool:
        ear = self._ear
        if ear.heard is None or len(self.output_ids) - self._num_heard < ear.hear_every:
            return True
        self._num_heard = len(self.output_ids)
        return ear.heard(self.output_ids)

    def _limit_s(self) -> float:
        """For the rest of the answer, from the last word on."""
        rest = self._question.sampling.max_new_tokens - len(self.output_ids)
        return self._line.pace.limit_s(max(rest, 0))

    def _due_s(self) -> float:
        """When it will have taken too long, if nothing more comes."""
        return min(due_s for due_s, _ in self._limits())

    def _give_up(self) -> EngineUnavailable:
        due_s, why = min(self._limits())
        if why == _STALLED:
            self._line.progress.stuck = f"{why} for {self._line.patience.stall_s:g} s"
        waited_s = due_s - self._started_s
        return EngineUnavailable(f"engine at {self._line.wire.url}: {why}, {waited_s:.0f} s on")

    def _limits(self) -> list[tuple[float, str]]:
        patience, limits = self._line.patience, [(self._word_s + self._limit_s(), _TOO_LONG)]
        if self._stream_every or self._is_followed:
            progress_s = max(self._word_s, self._line.progress.at_s)
            limits.append((progress_s + patience.stall_s, _STALLED))
        if self.output_ids:
            limits.append((self._word_s + patience.lost_s, _LOST))
        return limits
