"""The tools of the fault tests: a broken tool would let every test pass."""

from __future__ import annotations

import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.faults.clocks import Clock
from tests.faults.http_proxy import HttpProxy, Rule
from tests.faults.proxy import Mode, Proxy
from tests.faults.token_log import read_requests, remade


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: list[bytes]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not into the test's output."""


class _QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Connections that break are what is tested."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """Sends back what it gets, and keeps it."""
    _Echo.bodies = []
    with _QuietServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def put(port: int, body: bytes, path: str = "/key") -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, method="PUT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=2) as reply:
        return bytes(reply.read())


def test_a_proxy_passes_what_comes_and_goes(server: http.server.ThreadingHTTPServer) -> None:
    with Proxy(("127.0.0.1", server.server_port)) as proxy:
        assert put(proxy.port, b"x" * 200_000) == b"x" * 200_000
        assert proxy.num_met == 0


@pytest.mark.parametrize("kind", [Proxy, HttpProxy])
@pytest.mark.parametrize("mode", [Mode.REFUSE, Mode.RESET, Mode.FREEZE, Mode.LOSE_REPLY])
def test_each_mode_fails_and_passing_again_mends_it(
    server: http.server.ThreadingHTTPServer, kind: type[Proxy], mode: Mode
) -> None:
    with kind(("127.0.0.1", server.server_port)) as proxy:
        port = proxy.port
        proxy.set(mode)
        with pytest.raises((OSError, http.client.HTTPException)):
            put(proxy.port, b"lost")
        proxy.set(Mode.PASS)

        assert put(proxy.port, b"found") == b"found"
        assert proxy.port == port
    assert (b"lost" in _Echo.bodies) == (mode in (Mode.LOSE_REPLY, Mode.FREEZE))


def test_a_rule_answers_in_the_servers_place_as_often_as_it_says(
    server: http.server.ThreadingHTTPServer,
) -> None:
    with HttpProxy(("127.0.0.1", server.server_port)) as proxy:
        proxy.rules.append(Rule("PUT", "/a", status=503, code="SlowDown", num_left=2))
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="503"):
                put(proxy.port, b"no", "/a")

        assert put(proxy.port, b"yes", "/a") == b"yes"
        assert put(proxy.port, b"other", "/b") == b"other"
        assert _Echo.bodies == [b"yes", b"other"]
        assert [r.path for r in proxy.requests] == ["/a", "/a", "/a", "/b"]


def test_a_cut_connection_is_reset_and_not_just_closed(
    server: http.server.ThreadingHTTPServer,
) -> None:
    with (
        Proxy(("127.0.0.1", server.server_port)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        client.sendall(b"PUT ")
        while not proxy.num_connections:
            pass
        proxy.cut()

        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_places_of_an_answer_that_two_requests_sampled_were_made_twice(tmp_path: Path) -> None:
    entries = [
        {"t": 1.0, "asked": ["r1", "q", "m", 0]},
        {"t": 1.1, "made": [["r1", "q", 0, 10]]},
        {"t": 1.2, "left": ["r1"]},
        {"t": 2.0, "asked": ["r2", "q", "m", 6]},
        {"t": 2.1, "made": [["r2", "q", 6, 8]]},
        {"t": 2.2, "made": [["r2", "q", 8, 20]]},
        {"t": 2.3, "sent": ["r2", "stop"]},
        {"t": 3.0, "asked": ["r3", "other", "m", 0]},
        {"t": 3.1, "made": [["r3", "other", 0, 5]]},
    ]
    log = tmp_path / "engine.tokens"
    log.write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in entries))

    requests = read_requests([log])
    (again,) = remade(requests)

    assert [request.outcome for request in requests] == ["left", "stop", "cut off"]
    assert (again.request.rid, again.num_tokens) == ("r2", 4)
    assert [request.rid for request in again.earlier] == ["r1"]


def test_a_clock_is_ahead_for_the_processes_that_have_it_and_only_their_wall_clock(
    tmp_path: Path,
) -> None:
    clock = Clock(tmp_path, "fast")
    clock.set(1000.25)
    code = "import time; print(time.time(), time.monotonic())"

    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | clock.environ,
        capture_output=True,
        check=True,
    )
    now_s, monotonic_s = map(float, said.stdout.split())

    assert abs(now_s - time.time() - 1000.25) < 60
    assert abs(monotonic_s - time.monotonic()) < 60
