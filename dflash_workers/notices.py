"""Is this host about to be taken away? The clouds' spot notices and a watched file, one answer.

Asked every LOOK_EVERY_S by a thread of the worker's; a Notice -> the worker gives its batches back
and leaves. Nobody is asked unless settings say so (`spot_provider`, `spot_file`): elsewhere than in
its cloud a metadata address is just a stranger's. Every call ends in about TIMEOUT_S; a provider
that stays silent is named once in the log and then asked only once a minute. Follows the providers'
own documents: AWS IMDSv2 `spot/instance-action`, GCP `instance/preempted`, Azure Scheduled Events.
"""

from __future__ import annotations

import email.utils
import http.client
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from dflash_workers.contract.errors import Transient
from dflash_workers.contract.settings import Settings

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # GCP gives 30 s in all
TIMEOUT_S = 1.0  # a metadata service answers in milliseconds
MAX_FAILURES = 5  # in a row; then the provider is asked only every RARELY_S
RARELY_S = 60.0
MAX_BYTES = 65_536  # of a reply

METADATA_URL = "http://169.254.169.254"  # the same address in all three clouds
AWS_LEAD_S = 120.0  # a notice comes no earlier; more is a wrong clock
AWS_TOKEN_TTL_S = 21_600
GCP_LEAD_S = 25.0  # of 30 s, because the notice carries no time and was seen a look later
AZURE_LEAVING = ("Preempt", "Terminate")


@dataclass(frozen=True, slots=True)
class Notice:
    """This host is going."""

    left_s: float  # seconds until it goes; inf: no time was given
    reason: str

    def __str__(self) -> str:
        left = f"{self.left_s:.0f} s left" if math.isfinite(self.left_s) else "no time given"
        return f"{self.reason}, {left}"


class Source(Protocol):
    """Somebody who may know."""

    name: str

    def ask(self) -> Notice | None:
        """Raises Transient where there is no answer, or none that can be read."""


def open_notices(settings: Settings) -> Notices | None:
    """The sources that settings name; None where they name none."""
    url = settings.spot_url or METADATA_URL
    sources: list[Source] = []
    if settings.spot_provider == "aws":
        sources.append(Aws(url, heeds_rebalance=bool(settings.spot_rebalance)))
    elif settings.spot_provider == "gcp":
        sources.append(Gcp(url))
    elif settings.spot_provider == "azure":
        sources.append(Azure(url))
    if settings.spot_file:
        sources.append(File(settings.spot_file))
    return Notices(sources) if sources else None


class Notices:
    """All sources of one host. For one thread."""

    def __init__(
        self, sources: Sequence[Source], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._asked = [_Asked(source) for source in sources]

    def look(self) -> Notice | None:
        """The notice that leaves the least time. The same one is returned again and again."""
        notices = [notice for asked in self._asked if (notice := asked.look(self._clock()))]
        return min(notices, key=lambda notice: notice.left_s, default=None)


class _Asked:
    """A source, and how patient one still is with it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._num_failures = 0
        self._next_s = -math.inf

    def look(self, now_s: float) -> Notice | None:
        if now_s < self._next_s:
            return None
        try:
            notice = self._source.ask()
        except Transient as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._next_s = now_s + RARELY_S
            if self._num_failures == MAX_FAILURES:
                log.warning(
                    "no spot notice can come from %s, asked once a minute from now on: %s",
                    self._source.name,
                    error,
                )
            return None
        self._num_failures = 0
        return notice


class Aws:
    """IMDSv2: a token first, then 404 until a notice stands."""

    name = "aws"

    def __init__(self, url: str, *, heeds_rebalance: bool) -> None:
        self._url = f"{url}/latest"
        self._heeds_rebalance = heeds_rebalance
        self._token = ""

    def ask(self) -> Notice | None:
        if body := self._metadata("spot/instance-action"):
            return _aws_notice(body)
        if self._heeds_rebalance and self._metadata("events/recommendations/rebalance"):
            return Notice(math.inf, "aws: rebalance recommended")
        return None

    def _metadata(self, path: str) -> str | None:
        url = f"{self._url}/meta-data/{path}"
        for _ in range(2):  # a token that has run out is answered with 401
            self._token = self._token or self._new_token()
            status, body = _call("GET", url, {"X-aws-ec2-metadata-token": self._token})
            if status != http.HTTPStatus.UNAUTHORIZED:
                break
            self._token = ""
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        return _expect_ok(url, status, body)

    def _new_token(self) -> str:
        url = f"{self._url}/api/token"
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": f"{AWS_TOKEN_TTL_S}"}
        return _expect_ok(url, *_call("PUT", url, headers))


def _aws_notice(body: str) -> Notice:
    """That there is a body is the notice; what can't be read of it is taken as usual."""
    try:
        action = _parse(body)
    except Transient:
        action = {}
    reason = f"aws: spot {action.get('action', 'interruption')}"
    if action.get("action") == "hibernate":  # begins with the notice
        return Notice(0.0, reason)
    try:
        goes_at = datetime.fromisoformat(str(action.get("time"))).timestamp()
    except ValueError:
        return Notice(AWS_LEAD_S, reason)
    return Notice(min(max(goes_at - time.time(), 0.0), AWS_LEAD_S), reason)


class Gcp:
    """`instance/preempted`: FALSE, then TRUE."""

    name = "gcp"

    def __init__(self, url: str) -> None:
        self._url = f"{url}/computeMetadata/v1/instance/preempted"

    def ask(self) -> Notice | None:
        body = _expect_ok(self._url, *_call("GET", self._url, {"Metadata-Flavor": "Google"}))
        return Notice(GCP_LEAD_S, "gcp: preempted") if body.strip() == "TRUE" else None


class Azure:
    """Scheduled Events, of which those that name this machine count.

    The first call of a machine's life switches the service on and may take two minutes: until then
    the looks fail.
    """

    name = "azure"

    def __init__(self, url: str) -> None:
        self._events_url = f"{url}/metadata/scheduledevents?api-version=2020-07-01"
        self._name_url = f"{url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._machine = ""

    def ask(self) -> Notice | None:
        self._machine = self._machine or self._get(self._name_url).strip().lower()
        body = self._get(self._events_url)
        try:
            notices = [_azure_notice(event) for event in _parse(body)["Events"] if self._is(event)]
        except (AttributeError, KeyError, TypeError) as error:
            raise Transient(f"{self._events_url}: not understood: {body[:100]!r}") from error
        return min(notices, key=lambda notice: notice.left_s, default=None)

    def _is(self, event: Mapping[str, Any]) -> bool:
        """Whether it takes this machine away."""
        machines = [machine.lower() for machine in event["Resources"]]
        return event["EventType"] in AZURE_LEAVING and self._machine in machines

    def _get(self, url: str) -> str:
        return _expect_ok(url, *_call("GET", url, {"Metadata": "true"}))


def _azure_notice(event: Mapping[str, Any]) -> Notice:
    reason = f"azure: {event['EventType']}"
    try:
        goes_at = email.utils.parsedate_to_datetime(event["NotBefore"] or "").timestamp()
    except ValueError:  # empty once the event has begun
        return Notice(0.0, reason)
    return Notice(max(goes_at - time.time(), 0.0), reason)


class File:
    """A file that an operator, a preStop hook or a provider's agent makes.

    One that is left over makes every later worker of this host leave as well.
    """

    def __init__(self, path: str) -> None:
        self.name = path

    def ask(self) -> Notice | None:
        return Notice(math.inf, f"{self.name} exists") if os.path.exists(self.name) else None


def _call(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Status and text of a bare request: unlike urllib's it never goes through a proxy."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, url.removeprefix(f"http://{where.netloc}"), headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read(MAX_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a header's
        raise Transient(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _expect_ok(url: str, status: int, body: str) -> str:
    if status != http.HTTPStatus.OK:
        raise Transient(f"{url}: {status}: {body[:100]!r}")
    return body


def _parse(body: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Transient(f"not JSON: {body[:100]!r}") from error
    if not isinstance(value, dict):
        raise Transient(f"not a JSON object: {body[:100]!r}")
    return value
