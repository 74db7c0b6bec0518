"""The inference server, spoken to over HTTP: ids in, ids out, every reply checked.

Asked by rollout (generate), by the worker's start (wait_until_ready, facts) and by canary. One
Engine per process, in the one event loop, with one limit on requests in flight over all batches.
What may pass is tried again here with backoff, for a bounded time; what an engine died of is not,
so that the caller can find out who did it. Ids outside the vocabulary are never sent: they bring
the whole server down. attempt.py makes one request, dialects/ say how, replies.py checks it.
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
from dflash_workers.dialects.openai import OpenAi
from dflash_workers.dialects.sglang import Sglang
from dflash_workers.pace import Pace, Patience
from dflash_workers.questions import ABORT, Generation, Heard, Question
from dflash_workers.replies import FINISHES, Tokenizer, check
from dflash_workers.wire import Wire, is_broken, never_arrived

__all__ = ["Engine", "Generation", "Heard", "Patience", "Question"]

log = logging.getLogger(__name__)

DIALECTS: dict[str, Dialect] = {"sglang": Sglang(), "openai": OpenAi()}
_FACTS_S = 10.0
_POLL_S = 1.0
_PROBES = 4  # of a connection that breaks: a dying server may still accept for a moment
_BETWEEN_PROBES_S = 0.25


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
        self.slot = asyncio.Semaphore(max_in_flight)
        self.num_running = 0
        self.num_replies = 0  # refusals too
        self.num_deaths = 0  # seen; after one, another engine may stand behind the URL
        self.on_outcome: Callable[[bool], None] | None = None  # told whether a request succeeded
        self._patience = patience
        self._dialect = DIALECTS[dialect]
        self._tokenizer = tokenizer
        self._wire = Wire(url)
        self._pace = Pace(patience)
        self._progress = Progress()
        self._line = Line(self._wire, self._dialect, patience, self._pace, self._progress)
        self._away_since_s: float | None = None
        self._facts: Json = {}  # the last ones known
        self._has_facts = False
        self._death: str | None = None  # until it answers again
        self._alive_s = 0.0  # when it was last seen alive by a probe
        self._probing = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._wire.url

    @property
    def num_tokens(self) -> int:
        """Generated since the start."""
        return self._progress.num_tokens

    @property
    def takes_ids(self) -> bool:
        """Whether it can go on with a half-finished answer: prompt and ids so far as input."""
        return self._dialect.takes_ids

    async def close(self) -> None:
        """Break off what is running."""
        await self._wire.close()

    async def abort(self, rid: str) -> None:
        """End a request by its id. Never raises; does nothing where the engine can't."""
        await self._line.abort(rid)

    async def generate(
        self,
        question: Question,
        *,
        leaving: asyncio.Event | None = None,
        heard: Heard | None = None,
        hear_every: int = 0,
    ) -> Generation:
        """One answer.

        `heard` is called with all ids so far about every `hear_every` ids (0: never; so it is in a
        dialect that doesn't stream); if it returns False, or when `leaving` is set, the request is
        aborted and the answer is what was sampled until then, finish_reason "abort". Raises
        PromptRejected, AccessDenied, and EngineUnavailable once patience or the deadline is over,
        or at once where the engine died of something.
        """
        _check_ids(question)
        ear = Ear(leaving or asyncio.Event(), heard if hear_every else None, hear_every)
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
                await self._give_up_on(error, failing_since_s, question, pause_s)
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

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Until it is healthy. Raises EngineUnavailable after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._wire.call(self._dialect.health_path, self._patience.health_s)
                return
            except EngineUnavailable as error:
                if time.monotonic() >= deadline_s:
                    raise EngineUnavailable(
                        f"no engine within {timeout_s:.0f} s: {error}: start it, wait longer with "
                        "--wait-s, or pass --engine-url"
                    ) from error
            await asyncio.sleep(min(_POLL_S, timeout_s / 10))

    async def facts(self) -> Json:
        """Version and flags that decide what it generates, as it reports them; {} while away."""
        if not self._has_facts:
            try:
                body = await self._wire.call(self._dialect.facts_path, _FACTS_S)
                self._facts = self._dialect.read_facts(orjson.loads(body))
                self._has_facts = True
            except (PromptRejected, AttributeError, LookupError, TypeError, ValueError) as error:
                raise BadInput(
                    f"{self._wire.url} is no {self._dialect.name} server: its "
                    f"{self._dialect.facts_path} is not one: check --engine-url"
                ) from error
            except EngineUnavailable:
                return {}
        return self._facts

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
        """Evidence that the engine died or is stuck, remembered until it answers again.

        None: it lives, or nobody can tell. Many may ask at once: one of them looks. `seen`: what
        the caller saw of it, which is enough.
        """
        asked_s = time.monotonic()
        async with self._probing:
            if self._death is None and self._alive_s < asked_s:
                probed_s = time.monotonic()
                self._death = seen or self._progress.stuck or await self._probe()
                if self._death is None:
                    self._alive_s = probed_s
                else:
                    self.num_deaths += 1
            return self._death

    async def is_listening(self) -> bool:
        """Whether anybody answers at its URL, whatever is said."""
        try:
            await self._wire.call(self._dialect.health_path, self._patience.health_s)
        except EngineUnavailable as error:
            return not is_broken(error)
        return True

    async def _probe(self) -> str | None:
        for _ in range(_PROBES):
            try:
                await self._wire.call(self._dialect.health_path, self._patience.health_s)
                return None
            except EngineUnavailable as error:
                evidence, has_answered = f"{error}", not is_broken(error)
            if has_answered:
                break
            await asyncio.sleep(_BETWEEN_PROBES_S)
        # A probe is a real request, and may fail under a long prefill: alone it says nothing.
        silent_s = time.monotonic() - self._progress.at_s
        is_silent = self.num_running > 0 and silent_s >= self._patience.request_s
        return evidence if is_silent or not has_answered else None

    async def _answer(self, attempt: Attempt, question: Question, ear: Ear) -> Generation:
        if ear.leaving.is_set():
            return _ended_early(attempt, question)
        self.num_running += 1
        try:
            reply = await attempt.reply(self._facts)
        finally:
            self.num_running -= 1
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
        )

    async def _give_up_on(
        self, error: EngineUnavailable, since_s: float, question: Question, pause_s: float
    ) -> None:
        """Raise where it is no use to ask again after `pause_s`."""
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        self._has_facts = False  # it may come back as another
        was_inside = is_broken(error) and not never_arrived(error)
        if (was_inside or self._progress.stuck) and (evidence := await self.died()):
            raise EngineUnavailable(f"{error}: the engine died: {evidence}") from error
        if now_s - min(since_s, self._away_since_s) >= self._patience.away_s:
            raise error
        if question.deadline_s is not None and now_s + pause_s >= question.deadline_s:
            raise error

    def _note_outcome(self, ok: bool) -> None:
        """A request's: a refusal is a reply as well."""
        if ok:
            self._away_since_s = self._death = None
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
    is_sound = all(type(i) is int and 0 <= i < question.vocab_size for i in ids)
    return Generation(ids if is_sound else [], ABORT, 0, attempt.latency_s, {})


def _check_ids(question: Question) -> None:
    ids, size = question.input_ids, question.vocab_size
    if not ids:
        raise PromptRejected("no_ids", "the prompt renders to nothing")
    if not 0 <= min(ids) <= max(ids) < size:
        raise PromptRejected("id_outside_vocabulary", f"ids must be below the target's {size}")
