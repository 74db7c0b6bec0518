"""The inference server, spoken to over HTTP: ids in, ids out, every reply checked.

Called by rollout (generate) and by the worker's start (wait_until_ready, facts). One Engine per
process, living in the one event loop, with one limit on requests in flight over all batches. Errors
become ours here, by table; what may pass is tried again here with backoff, for a bounded time. Ids
outside the vocabulary are never sent: they bring the whole server down. An unanswered request is
aborted, so that the engine doesn't go on for nobody. Follows SGLang's native `/generate`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import orjson

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    EngineUnavailable,
    FleetError,
    PromptRejected,
)
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.quality import LENGTH, STOP

log = logging.getLogger(__name__)

# The fate of each status; one not listed may pass (408, 409, 425, 429, 5xx, a proxy's own). 404 is
# among these: it speaks of the server at this URL and not of the prompt.
FATE_BY_STATUS: dict[int, type[FleetError]] = {
    400: PromptRejected,
    401: AccessDenied,
    403: AccessDenied,
    413: PromptRejected,
    422: PromptRejected,
}
FACTS = (
    "version",
    "model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "context_length",
    "attention_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the engine is waited for."""

    request_s: float = 60.0  # one request, however short its answer
    token_s: float = 0.25  # more per token it may generate: 4 tokens/s is slow but alive
    away_s: float = 60.0  # no success for so long: give up
    backoff_s: float = 0.5  # doubled each time, with full jitter
    max_backoff_s: float = 8.0
    abort_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer as the engine sampled it."""

    output_ids: list[int]  # stop id included
    finish_reason: str  # stop | length
    cached_tokens: int
    latency_s: float
    spec: Json  # speculation statistics


class Engine:
    """Made and used inside one event loop."""

    def __init__(self, url: str, max_in_flight: int, patience: Patience) -> None:
        self.slot = asyncio.Semaphore(max_in_flight)
        self.num_running = 0
        self.num_tokens = 0  # generated since the start
        self._url = url.rstrip("/")
        self._patience = patience
        self._away_since: float | None = None
        self._facts: Json | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            headers={"Content-Type": "application/json"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, input_ids: list[int], seed: int, spec: RunSpec) -> Generation:
        """One answer. Raises PromptRejected, or EngineUnavailable once patience is over."""
        _check_ids(input_ids, spec.target.vocab_size)
        failing_since: float | None = None
        for num_failures in itertools.count():
            try:
                generation = await self._ask(input_ids, seed, spec)
            except EngineUnavailable as error:
                now = time.monotonic()
                failing_since = failing_since or now
                self._away_since = self._away_since or now
                self._facts = None  # it may come back as another
                if now - min(failing_since, self._away_since) >= self._patience.away_s:
                    raise
                log.info("asked again: %s", error)
                await asyncio.sleep(self._backoff_s(num_failures))
            else:
                self._away_since = None
                self.num_tokens += len(generation.output_ids)
                return generation
        raise AssertionError("unreachable")

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Until it answers /health. Raises EngineUnavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._call("GET", "/health", b"", 25)
                return
            except EngineUnavailable as error:
                if time.monotonic() >= deadline:
                    raise EngineUnavailable(
                        f"no engine within {timeout_s:.0f} s: {error}: start it, wait longer with "
                        "--wait-s, or pass --engine-url"
                    ) from error
            await asyncio.sleep(min(1.0, timeout_s / 10))

    async def facts(self) -> Json:
        """Version and flags that decide what it generates, as it reports them; {} while away."""
        if self._facts is None:
            try:
                reported = orjson.loads(await self._call("GET", "/server_info", b"", 10))
                self._facts = {k: reported[k] for k in FACTS if reported.get(k) is not None}
            except (PromptRejected, ValueError, AttributeError) as error:
                raise BadInput(
                    f"{self._url} is no SGLang server: its /server_info is not one: "
                    "check --engine-url"
                ) from error
            except EngineUnavailable:
                return {}
        return self._facts

    async def _ask(self, input_ids: list[int], seed: int, spec: RunSpec) -> Generation:
        rid = uuid.uuid4().hex
        timeout_s = self._patience.request_s
        timeout_s += self._patience.token_s * spec.sampling.max_new_tokens
        started = time.monotonic()
        is_answered = False
        self.num_running += 1
        try:
            body = orjson.dumps(_question(rid, input_ids, seed, spec))
            reply = await self._call("POST", "/generate", body, timeout_s)
            is_answered = True
        finally:
            self.num_running -= 1
            if not is_answered:
                await self._abort(rid)
        return _checked(reply, input_ids, spec, time.monotonic() - started)

    async def _abort(self, rid: str) -> None:
        try:
            body = orjson.dumps({"rid": rid})
            await self._call("POST", "/abort_request", body, self._patience.abort_s)
        except FleetError as error:
            log.debug("not aborted: %s", error)

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        with _translated(self._url):
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self._url + path, data=body or None) as response,
            ):
                reply = await response.read()
        if response.status == 200:
            return reply
        detail = f"engine at {self._url}{path}: {response.status}: {_excerpt(reply)}"
        fate = FATE_BY_STATUS.get(response.status, EngineUnavailable)
        raise PromptRejected("engine_refused", detail) if fate is PromptRejected else fate(detail)

    def _backoff_s(self, num_failures: int) -> float:
        ceiling_s = self._patience.backoff_s * 2 ** min(num_failures, 16)
        return random.uniform(0, min(ceiling_s, self._patience.max_backoff_s))


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except aiohttp.InvalidURL as error:
        raise BadInput(f"engine URL {url!r} is not valid") from error
    except TimeoutError as error:
        raise EngineUnavailable(f"engine at {url}: no answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnavailable(f"engine at {url}: {type(error).__name__}: {error}") from error


def _question(rid: str, input_ids: list[int], seed: int, spec: RunSpec) -> Json:
    sampling = spec.sampling
    return {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "sampling_seed": seed,
        },
    }


def _check_ids(input_ids: list[int], vocab_size: int) -> None:
    if not input_ids:
        raise PromptRejected("no_ids", "the prompt renders to nothing")
    if not 0 <= min(input_ids) <= max(input_ids) < vocab_size:
        raise PromptRejected(
            "id_outside_vocabulary", f"ids must be below the target's {vocab_size}"
        )


def _checked(reply: bytes, input_ids: list[int], spec: RunSpec, latency_s: float) -> Generation:
    """The reply, if it agrees with itself and with what was asked. Raises EngineUnavailable."""
    try:
        answer = orjson.loads(reply)
        output_ids, meta = answer["output_ids"], answer["meta_info"]
        finish_reason = meta["finish_reason"]["type"]
        facts = {
            "finish_reason": finish_reason in (STOP, LENGTH),
            "completion_tokens": len(output_ids) == meta["completion_tokens"] > 0,
            "prompt_tokens": len(input_ids) == meta["prompt_tokens"],
            "output_ids": all(
                type(i) is int and 0 <= i < spec.target.vocab_size for i in output_ids
            ),
        }
        statistics = {k: v for k, v in meta.items() if k.startswith("spec_")}
        cached_tokens = int(meta.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineUnavailable(f"engine's reply is garbled: {error!r}") from error
    if wrong := [name for name, holds in facts.items() if not holds]:
        raise EngineUnavailable(f"engine's reply contradicts itself: {wrong[0]}: {_excerpt(reply)}")
    return Generation(output_ids, finish_reason, cached_tokens, latency_s, statistics)


def _excerpt(body: bytes) -> str:
    return body[-300:].decode(errors="replace")
