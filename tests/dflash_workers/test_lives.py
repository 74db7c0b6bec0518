"""What tells one life of an engine from another."""

from __future__ import annotations

import socket

import pytest

from dflash_workers.lives import Life, sockets_of


@pytest.mark.parametrize(
    ("earlier", "later", "is_another"),
    [
        (Life(b"1"), Life(b"1"), False),
        (Life(b"1"), Life(b"2"), True),
        (Life(), Life(b"2"), None),
        (Life(b"1"), Life(), None),
        (Life(), Life(), None),
        (Life(b"1", frozenset("a")), Life(b"1", frozenset("b")), False),  # a proxy, started anew
        (Life(b"1", frozenset("a")), Life(b"2", frozenset("a")), True),  # behind a proxy
        (Life(b"", frozenset("a")), Life(b"", frozenset("b")), True),
        (Life(b"", frozenset("a")), Life(b"", frozenset("a")), None),  # a proxy's, perhaps
        (Life(b"1", frozenset("a")), Life(b"", frozenset("b")), True),
    ],
)
def test_what_the_engine_says_counts_before_what_the_kernel_shows(
    earlier: Life, later: Life, is_another: bool | None
) -> None:
    assert later.is_other_than(earlier) is is_another


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_socket_that_listens_anew_at_the_same_port_is_another(host: str) -> None:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    url = f"http://[{host}]" if ":" in host else f"http://{host}"
    seen = []
    with socket.create_server((host, 0), family=kind) as server:
        port = server.getsockname()[1]
        seen += [sockets_of(f"{url}:{port}")] * 2
        with socket.create_connection((host, port)):  # connections don't count
            seen.append(sockets_of(f"{url}:{port}"))
    gone = sockets_of(f"{url}:{port}")
    with socket.create_server((host, port), family=kind):
        anew = sockets_of(f"{url}:{port}")

    first, second, connected = seen
    assert first == second == connected
    assert len(first) == len(anew) == 1
    assert first.isdisjoint(anew)
    assert gone == frozenset()


@pytest.mark.parametrize("url", ["http://gpu-7:30000", "https://engine.example.com"])
def test_of_an_engine_elsewhere_no_socket_is_seen(url: str) -> None:
    assert sockets_of(url) == frozenset()
