"""The inference server, spoken to over HTTP: ids in, ids out, every reply checked.

Asked by rollout (generate), by gate before it is used (wait_until_there, look) and by canary. One
Engine per process, in the one event loop, with one limit on requests in flight over all batches.
What may pass is tried again here with backoff, for a bounded time; what an engine died of is not,
so that the caller can find out who did it. Ids outside the vocabulary are never sent: they bring
the whole server down. attempt.py makes one request, dialects/ say how, replies.py checks it,
deaths.py says whether the engine died.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Callable

import orjson

from dflash_workers.attempt import Attempt, Dialect, Ear, Line, Progress
from dflash_workers.contract.errors import (
    BadInput,
    EngineUnavailable,
    FleetError,
    PromptRejected,
)
from dflash_workers.contract.records import Json
from dflash_workers.deaths import Deaths
from dflash_workers.dialects.openai import OpenAi
from dflash_workers.dialects.sglang import Sglang
from dflash_workers.pace import Pace, Patience
from dflash_workers.questions import ABORT, Generation, Heard, Leaving, Question, are_ids
from dflash_workers.replies import FINISHES, Tokenizer, check
from dflash_workers.seats import Slots
from dflash_workers.wire import Wire, has_status, is_broken, never_arrived

__all__ = ["Engine", "Generation", "Heard", "Leaving", "Patience", "Question"]

log = logging.getLogger(__name__)

DIALECTS: dict[str, Dialect] = {"sglang": Sglang(), "openai": OpenAi()}
_FACTS_S = 10.0
_POLL_S = 1.0


class Engine:
    """Made and used inside one event loop."""

    def __init__(
        self,
        url: str,
        max_in_flight: int,
        patience: Patience,
        *,
        dialect: str = "sglang",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.slots = Slots(max_in_flight)
        self.num_replies = 0  # refusals too
        self.on_outcome: Callable[[bool], None] | None = None  # told whether a request succeeded
        self.facts: Json = {}  # version and flags that decide what it generates, as it last said
        self._patience = patience
        self._dialect = DIALECTS[dialect]
        self._tokenizer = tokenizer
        self._wire = Wire(url)
        self._pace = Pace(patience)
        self._progress = Progress()
        self._line = Line(self._wire, self._dialect, patience, self._pace, self._progress)
        self._away_since_s: float | None = None
        health_path = self._dialect.health_path
        self._deaths = Deaths(self._wire, health_path, patience, self._progress)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._wire.url

    @property
    def num_tokens(self) -> int:
        """Generated since the start."""
        return self._progress.num_tokens

    @property
    def num_running(self) -> int:
        """Requests in it."""
        return self._progress.num_running

    @property
    def num_deaths(self) -> int:
        """Seen since the start; after one, another engine may stand behind the URL."""
        return self._deaths.num

    @property
    def last_death(self) -> str:
        """What was seen of it; empty where there was none."""
        return self._deaths.evidence

    @property
    def takes_ids(self) -> bool:
        """Whether it can go on with a half-finished answer: prompt and ids so far as input."""
        return self._dialect.takes_ids

    async def close(self) -> None:
        """Break off what is running."""
        await self._wire.close()

    @property
    def grown_at_s(self) -> float:
        """When it gave its last id, as time.monotonic() counts."""
        return self._progress.at_s

    def silence_s(self, num_tokens: int) -> float:
        """The longest that a request for so many may stay without a new id, tries included."""
        patience = self._patience
        limit_s = max(self._pace.limit_s(num_tokens), patience.lost_s)
        return limit_s + patience.away_s + patience.max_retry_after_s

    async def abort(self, rid: str) -> None:
        """End a request by its id. Never raises; does nothing where the engine can't."""
        await self._line.abort(rid)

    async def generate(
        self,
        question: Question,
        *,
        leaving: Leaving | None = None,
        heard: Heard | None = None,
        hear_every: int = 0,
    ) -> Generation:
        """One answer.

        `heard` is called with all ids so far about every `hear_every` ids (0: never; so it is in a
        dialect that doesn't stream); if it returns False, or when `leaving` is set, the request is
        aborted and the answer is what was sampled until then, finish_reason "abort". Raises
        PromptRejected, AccessDenied, and EngineUnavailable once patience is over, or at once where
        the engine died of something.
        """
        _check_ids(question)
        ear = Ear(leaving or Leaving(), heard if hear_every else None, hear_every)
        failing_since_s: float | None = None
        for num_failures in itertools.count():
            attempt = Attempt(question, ear, self._line)
            try:
                generation = await self._answer(attempt, question, ear)
            except EngineUnavailable as error:
                self._note_outcome(False)
                if ear.leaving.is_set():
                    return _ended_early(attempt, question)
                failing_since_s = failing_since_s or time.monotonic()
                pause_s = self._backoff_s(num_failures, error)
                await self._give_up_on(error, failing_since_s)
                log.info("asked again: %s", error)
                await ear.pause(pause_s)
                continue
            except FleetError as error:
                self._note_outcome(isinstance(error, PromptRejected))
                raise
            if generation.output_ids:  # none: we left before it said anything
                self._note_outcome(True)
            return generation
        raise AssertionError("unreachable")

    async def wait_until_there(self, timeout_s: float) -> None:
        """Until it answers, if with a 503: it says so under a long prefill, and works all the same.

        Raises EngineUnavailable after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._wire.call(self._dialect.health_path, self._patience.health_s)
                return
            except EngineUnavailable as error:
                if has_status(error):
                    return
                if time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(min(_POLL_S, timeout_s / 10))

    async def look(self) -> None:
        """Note its facts, and whether it is the process that it was. Due before it is used.

        Raises BadInput where it is no such server; EngineUnavailable.
        """
        path = self._dialect.facts_path
        try:
            said = orjson.loads(await self._wire.call(path, _FACTS_S))
            self.facts = self._dialect.read_facts(said)
        except (PromptRejected, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"{self._wire.url} is no {self._dialect.name} server: its {path} is not one: "
                "check --engine-url"
            ) from error
        await self._deaths.look()

    async def log_probs(self, input_ids: list[int]) -> list[float] | None:
        """Of each id but the first, given those before it; None where the engine tells none.

        Raises EngineUnavailable.
        """
        asked = self._dialect.ask_log_probs(input_ids)
        if asked is None:
            return None
        try:
            body = await self._wire.call(self._dialect.path, self._patience.request_s, asked)
            found = self._dialect.read_log_probs(orjson.loads(body))
        except PromptRejected as error:
            log.info("no log-probabilities: %s", error)
            return None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"the log-probabilities are garbled: {error!r}") from error
        if len(found) != len(input_ids) - 1 or not all(map(math.isfinite, found)):
            raise EngineUnavailable(f"{len(found)} log-probabilities for {len(input_ids)} ids")
        return found

    async def died(self, seen: str = "") -> str | None:
        """Evidence that it died or is stuck, or None; see Deaths.died."""
        return await self._deaths.died(seen)

    def was_cut(self, death: int) -> bool:
        """Whether that one of `num_deaths` was a connection's alone, as is known after a look."""
        return self._deaths.was_cut(death)

    async def is_listening(self) -> bool:
        """Whether anybody answers at its URL, whatever is said."""
        try:
            await self._wire.call(self._dialect.health_path, self._patience.health_s)
        except EngineUnavailable as error:
            return not is_broken(error)
        return True

    async def _answer(self, attempt: Attempt, question: Question, ear: Ear) -> Generation:
        if ear.leaving.is_set():
            return _ended_early(attempt, question)
        self._progress.num_running += 1
        try:
            reply = await attempt.reply(self.facts)
        finally:
            self._progress.num_running -= 1
        if reply is None:
            return _ended_early(attempt, question)
        if FINISHES.get(reply.finish or "") == ABORT and not ear.leaving.is_set():
            raise self._wire.error_of(reply.status or 503, f"it gave up: {reply.detail}")
        checked = check(reply, question, self._tokenizer)
        self._pace.note(len(checked.output_ids), attempt.latency_s)
        return Generation(
            output_ids=checked.output_ids,
            finish_reason=checked.finish_reason,
            cached_tokens=reply.cached_tokens,
            latency_s=attempt.latency_s,
            spec=checked.spec,
            notes=checked.notes,
            shown=checked.shown,
        )

    async def _give_up_on(self, error: EngineUnavailable, since_s: float) -> None:
        """Raise where it is no use to ask again."""
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        was_inside = is_broken(error) and not never_arrived(error)
        if (was_inside or self._progress.stuck) and (evidence := await self.died()):
            raise EngineUnavailable(f"{error}: the engine died: {evidence}") from error
        if now_s - min(since_s, self._away_since_s) >= self._patience.away_s:
            raise error

    def _note_outcome(self, ok: bool) -> None:
        """A request's: a refusal is a reply as well."""
        if ok:
            self._away_since_s = None
            self._deaths.note_reply()
            self.num_replies += 1
        if self.on_outcome is not None:
            self.on_outcome(ok)

    def _backoff_s(self, num_failures: int, error: EngineUnavailable) -> float:
        """With full jitter, but never before the engine wants to be asked again."""
        patience = self._patience
        ceiling_s = min(patience.backoff_s * 2 ** min(num_failures, 16), patience.max_backoff_s)
        wanted_s = min(error.retry_after_s, patience.max_retry_after_s)
        return max(random.uniform(0, ceiling_s), wanted_s)


def _ended_early(attempt: Attempt, question: Question) -> Generation:
    ids = attempt.output_ids
    is_sound = are_ids(ids, question.vocab_size)
    return Generation(ids if is_sound else [], ABORT, 0, attempt.latency_s, {})


def _check_ids(question: Question) -> None:
    ids, size = question.input_ids, question.vocab_size
    if not ids:
        raise PromptRejected("no_ids", "the prompt renders to nothing")
    if not 0 <= min(ids) <= max(ids) < size:
        raise PromptRejected("id_outside_vocabulary", f"ids must be below the target's {size}")
