"""HTTP to the engine: one call, or one stream of events; every failure becomes ours, by one table.

Used by engine alone. A refusal inside a stream, which comes with status 200, has the same fate as
one with a status of its own. No call is without a time limit, here or, where attempt asks, around
it; no redirect is followed: a POST would turn into a GET of somebody else's page.
"""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import aiohttp
import orjson

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    EngineUnavailable,
    FleetError,
    PromptRejected,
)
from dflash_workers.contract.records import Json

# The fate of each status. One not listed may pass, and is waited out: 408, 409, 425, 429, 5xx, and
# what speaks of the server at this URL and not of the prompt (3xx, 404, 405, a proxy's own).
FATE_BY_STATUS: dict[int, type[FleetError]] = {
    400: PromptRejected,
    401: AccessDenied,
    403: AccessDenied,
    413: PromptRejected,
    422: PromptRejected,
}
_CONNECT_S = 5.0
# A server closes what is idle, SGLang after 5 s, and what is asked in that moment is lost.
_IDLE_S = 1.0
_EXCERPT_BYTES = 300
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"


class Wire:
    """Made and used inside one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # looked through and written for each request
            headers={"Content-Type": "application/json"},
        )

    async def close(self) -> None:
        """Break off what is running."""
        await self._session.close()

    async def call(self, path: str, timeout_s: float | None, question: Json | None = None) -> bytes:
        """The reply's body: of a POST where there is a question, else of a GET. No `timeout_s`: the
        caller keeps the time.
        """
        with self._translated():
            async with self._request(path, timeout_s, question) as response:
                return await self._accepted(response)

    async def events(
        self, path: str, timeout_s: float | None, question: Json
    ) -> AsyncGenerator[bytes, None]:
        """The bodies of server-sent events; of a server that doesn't stream, its one reply."""
        with self._translated():
            async with self._request(path, timeout_s, question) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    yield await self._accepted(response)
                    return
                rest = b""
                async for received in response.content.iter_any():
                    *lines, rest = (rest + received).split(b"\n")
                    for line in lines:
                        if line.startswith(_EVENT) and line[len(_EVENT) :].strip() != _LAST_EVENT:
                            yield line[len(_EVENT) :]

    def error_of(self, status: int, detail: str, retry_after_s: float = 0.0) -> FleetError:
        """What a refusal is to us."""
        text = f"engine at {self.url}: {status}: {detail}"
        fate = FATE_BY_STATUS.get(status, EngineUnavailable)
        if fate is PromptRejected:
            return PromptRejected("engine_refused", text)
        if fate is EngineUnavailable:
            return EngineUnavailable(text, retry_after_s)
        return fate(text)

    def refusal_in(self, body: Json) -> FleetError | None:
        """The error that a reply with status 200 holds in place of an answer."""
        error = body if body.get("object") == "error" else body.get("error")
        if not error:
            return None
        facts = error if isinstance(error, dict) else {"message": error}
        code = facts.get("code")
        return self.error_of(code if type(code) is int else 500, str(facts.get("message")))

    def _request(
        self, path: str, timeout_s: float | None, question: Json | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        method, body = ("GET", None) if question is None else ("POST", orjson.dumps(question))
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        return self._session.request(
            method, self.url + path, data=body, timeout=limit, allow_redirects=False
        )

    async def _accepted(self, response: aiohttp.ClientResponse) -> bytes:
        body = await response.read()
        if response.status == 200:
            return body
        detail = f"{response.url.path}: {excerpt(body)}"
        retry_after_s = _seconds(response.headers.get("Retry-After", ""))
        raise self.error_of(response.status, detail, retry_after_s)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise BadInput(f"engine URL {self.url!r} is not valid") from error
        except TimeoutError as error:
            raise EngineUnavailable(f"engine at {self.url}: no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(
                f"engine at {self.url}: {type(error).__name__}: {error}"
            ) from error


def never_arrived(error: EngineUnavailable) -> bool:
    """Whether the question can't have reached the engine, so that it died of something else."""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def is_broken(error: EngineUnavailable) -> bool:
    """Whether a connection was refused or broke off: nobody listens there, or died just then."""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientError | OSError | EOFError) and not isinstance(
        cause, TimeoutError | aiohttp.ClientConnectorDNSError
    )


def has_status(error: EngineUnavailable) -> bool:
    """Whether somebody answered, though with a refusal."""
    return error.__cause__ is None


def excerpt(body: bytes) -> str:
    """The end of a body, for messages."""
    return body[-_EXCERPT_BYTES:].decode(errors="replace")


def _seconds(retry_after: str) -> float:
    """Retry-After, which is seconds or a date; 0 where it is absent or neither."""
    try:
        wait_s = float(retry_after)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(wait_s, 0.0) if math.isfinite(wait_s) else 0.0
