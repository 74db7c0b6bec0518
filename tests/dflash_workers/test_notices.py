"""Spot notices, asked of small servers that answer as each cloud documents that it does."""

from __future__ import annotations

import email.utils
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.notices import MAX_FAILURES, RARELY_S, Gcp, Notices, open_notices

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Cloud:
    """What a metadata service knows (`bodies`), whom it lets in, and what it was asked."""

    def __init__(self) -> None:
        self.bodies: dict[str, str] = {}
        self.header = ("", "")  # a GET without it is refused
        self.token = ""  # what a PUT of a token gets; empty: no such method here
        self.token_ttls: list[str] = []
        self.asked: list[str] = []
        self.url = ""

    def get(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        self.asked.append(path)
        name, value = self.header
        if name and headers.get(name.lower()) != (self.token or value):
            return 401, ""
        return (200, self.bodies[path]) if path in self.bodies else (404, "not found")

    def put(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if not self.token or path != "/latest/api/token":
            return 404, ""
        self.token_ttls.append(headers.get("x-aws-ec2-metadata-token-ttl-seconds", ""))
        return 200, self.token


@contextmanager
def serving(cloud: Cloud) -> Iterator[Cloud]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*cloud.get(self.path, self._headers()))

        def do_PUT(self) -> None:
            self._reply(*cloud.put(self.path, self._headers()))

        def _headers(self) -> dict[str, str]:
            return {name.lower(): value for name, value in self.headers.items()}

        def _reply(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    cloud.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def aws() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.token, cloud.header = "t1", ("X-aws-ec2-metadata-token", "")
    with serving(cloud):
        yield cloud


@pytest.fixture
def gcp() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.header = ("Metadata-Flavor", "Google")
    cloud.bodies[PREEMPTED] = "FALSE"
    with serving(cloud):
        yield cloud


@pytest.fixture
def azure() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.header = ("Metadata", "true")
    cloud.bodies = {NAME: "GPU-7", EVENTS: events()}
    with serving(cloud):
        yield cloud


def notices(provider: str, url: str, *, rebalance: int = 0, file: str = "") -> Notices:
    settings = Settings(
        spot_provider=provider, spot_url=url, spot_rebalance=rebalance, spot_file=file
    )
    opened = open_notices(settings)
    assert opened is not None
    return opened


def action(kind: str, in_s: float) -> str:
    goes_at = datetime.now(UTC) + timedelta(seconds=in_s)
    return json.dumps({"action": kind, "time": goes_at.strftime("%Y-%m-%dT%H:%M:%SZ")})


def events(*kinds: str, machine: str = "gpu-7", in_s: float = 30, begun: bool = False) -> str:
    not_before = "" if begun else email.utils.formatdate(time.time() + in_s, usegmt=True)
    return json.dumps(
        {
            "DocumentIncarnation": 1,
            "Events": [
                {
                    "EventId": "A",
                    "EventType": kind,
                    "ResourceType": "VirtualMachine",
                    "Resources": [machine],
                    "EventStatus": "Started" if begun else "Scheduled",
                    "NotBefore": not_before,
                }
                for kind in kinds
            ],
        }
    )


def test_nobody_is_asked_unless_settings_name_somebody() -> None:
    assert open_notices(Settings()) is None
    assert open_notices(Settings(spot_provider="none")) is None


def test_the_variables_of_the_environment_choose_the_source(tmp_path: Path, aws: Cloud) -> None:
    environ = {"DFLASH_SPOT_PROVIDER": "aws", "DFLASH_SPOT_URL": aws.url}

    opened = open_notices(load_settings({}, environ, tmp_path / "none.toml"))

    assert opened is not None
    assert opened.look() is None
    assert aws.asked == [ACTION]


@pytest.mark.parametrize(
    "wrong", [{"spot_provider": "amazon"}, {"spot_url": "169.254.169.254"}, {"spot_url": "https:/"}]
)
def test_a_wrong_spot_setting_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="spot_"):
        load_settings(wrong, {})


def test_aws_notice_is_seen_with_the_time_that_is_left(aws: Cloud) -> None:
    watched = notices("aws", aws.url)

    assert watched.look() is None
    aws.bodies[ACTION] = action("terminate", in_s=118)
    notice = watched.look()

    assert notice is not None
    assert 110 < notice.left_s <= 118
    assert "terminate" in str(notice)
    assert aws.token_ttls == ["21600"]  # one token for all looks


def test_aws_hibernation_leaves_no_time(aws: Cloud) -> None:
    aws.bodies[ACTION] = action("hibernate", in_s=120)

    notice = notices("aws", aws.url).look()

    assert notice is not None
    assert notice.left_s == 0


def test_an_aws_token_that_has_run_out_is_renewed_within_the_look(aws: Cloud) -> None:
    watched = notices("aws", aws.url)
    watched.look()

    aws.token = "t2"
    aws.bodies[ACTION] = action("stop", in_s=100)

    assert watched.look() is not None


@pytest.mark.parametrize("in_s", [-60, 3600])
def test_a_wrong_clock_leaves_neither_less_than_nothing_nor_more_than_aws_ever_gives(
    aws: Cloud, in_s: float
) -> None:
    aws.bodies[ACTION] = action("terminate", in_s=in_s)

    notice = notices("aws", aws.url).look()

    assert notice is not None
    assert 0 <= notice.left_s <= 120


@pytest.mark.parametrize("body", ["{}", "garbage", '{"action": "stop", "time": "soon"}', "[]"])
def test_an_aws_notice_that_is_not_understood_is_a_notice(aws: Cloud, body: str) -> None:
    aws.bodies[ACTION] = body

    assert notices("aws", aws.url).look() is not None


def test_a_rebalance_recommendation_counts_only_where_settings_say_so(aws: Cloud) -> None:
    aws.bodies[REBALANCE] = json.dumps({"noticeTime": "2026-11-30T08:22:00Z"})

    assert notices("aws", aws.url).look() is None
    notice = notices("aws", aws.url, rebalance=1).look()

    assert notice is not None
    assert math.isinf(notice.left_s)


def test_gcp_preemption_is_seen(gcp: Cloud) -> None:
    watched = notices("gcp", gcp.url)

    assert watched.look() is None
    gcp.bodies[PREEMPTED] = "TRUE"
    notice = watched.look()

    assert notice is not None
    assert 0 < notice.left_s < 30


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_azure_events_that_take_this_machine_are_seen(azure: Cloud, kind: str) -> None:
    watched = notices("azure", azure.url)

    assert watched.look() is None
    azure.bodies[EVENTS] = events(kind, in_s=30)
    notice = watched.look()

    assert notice is not None
    assert 20 < notice.left_s <= 30


def test_an_azure_event_that_has_begun_leaves_no_time(azure: Cloud) -> None:
    azure.bodies[EVENTS] = events("Preempt", begun=True)

    notice = notices("azure", azure.url).look()

    assert notice is not None
    assert notice.left_s == 0


def test_azure_events_of_other_machines_and_other_kinds_are_none_of_ours(azure: Cloud) -> None:
    watched = notices("azure", azure.url)

    azure.bodies[EVENTS] = events("Preempt", machine="gpu-8")
    assert watched.look() is None

    azure.bodies[EVENTS] = events("Freeze", "Reboot")
    assert watched.look() is None


def test_a_file_is_a_notice_while_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "going"
    watched = open_notices(Settings(spot_file=str(path)))
    assert watched is not None

    assert watched.look() is None
    path.touch()
    assert watched.look() is not None
    path.unlink()
    assert watched.look() is None


def test_of_two_notices_the_one_that_leaves_less_time_is_told(gcp: Cloud, tmp_path: Path) -> None:
    path = tmp_path / "going"
    path.touch()
    watched = notices("gcp", gcp.url, file=str(path))

    first = watched.look()
    gcp.bodies[PREEMPTED] = "TRUE"
    second = watched.look()

    assert first is not None and second is not None
    assert math.isinf(first.left_s)
    assert second.left_s < 30


def test_a_provider_that_isnt_there_is_soon_asked_only_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Cloud()) as stranger:  # knows no such path
        now_s = 0.0
        watched = Notices([Gcp(stranger.url)], lambda: now_s)
        asked_at = []

        for now_s in range(200):
            num_before = len(stranger.asked)
            watched.look()
            asked_at += [now_s] * (len(stranger.asked) - num_before)

    assert asked_at[:MAX_FAILURES] == list(range(MAX_FAILURES))
    later = asked_at[MAX_FAILURES - 1 :]
    assert [b - a for a, b in itertools.pairwise(later)] == [RARELY_S] * (len(later) - 1)
    assert len(later) >= 3
    assert caplog.text.count("no spot notice can come from gcp") == 1


def test_a_provider_that_comes_back_is_asked_at_each_look_again(gcp: Cloud) -> None:
    now_s = 0.0
    watched = Notices([Gcp(gcp.url)], lambda: now_s)
    gcp.bodies.clear()
    for _ in range(MAX_FAILURES):
        watched.look()

    gcp.bodies[PREEMPTED], now_s = "FALSE", RARELY_S
    watched.look()
    gcp.bodies.clear()
    watched.look()  # one failure more is the first of a new row
    gcp.bodies[PREEMPTED] = "TRUE"

    assert watched.look() is not None


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_a_look_at_a_provider_that_stays_silent_ends_within_seconds(provider: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        watched = notices(provider, f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()

        assert watched.look() is None

        assert time.monotonic() - started < 2.5


@pytest.mark.parametrize("body", ["", "nonsense", "[]", '{"Events": [3]}', '{"Events": [{}]}'])
def test_a_reply_that_is_not_understood_is_no_notice_and_no_crash(azure: Cloud, body: str) -> None:
    azure.bodies[EVENTS] = body

    assert notices("azure", azure.url).look() is None


def test_no_proxy_of_the_environment_is_used(gcp: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    gcp.bodies[PREEMPTED] = "TRUE"

    assert notices("gcp", gcp.url).look() is not None
