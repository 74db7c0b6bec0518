"""embedded.py: a Redis and an S3 that keep their data, their passwords, and to themselves."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import socket
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dflash_workers import embedded
from dflash_workers.contract.errors import AccessDenied, Missing, NotEnough
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.embedded import embedded_services, start_redis, start_s3
from dflash_workers.launcher import Child


@pytest.mark.parametrize("from_wheel", [False, True])
def test_redis_keeps_its_data_and_password_over_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_wheel: bool
) -> None:
    if from_wheel:
        monkeypatch.setenv("PATH", "/nowhere")
    redis, url = start_redis(tmp_path)
    with redis, open_redis(Settings(redis_url=url)) as client:
        client.set("key", "value")
        _kill(redis)

    again, url_again = start_redis(tmp_path)

    with again, open_redis(Settings(redis_url=url_again)) as client:
        assert client.get("key") == b"value"
    assert url.split("@")[0] == url_again.split("@")[0]


@pytest.mark.slow
def test_s3_keeps_its_objects_and_keys_over_a_kill(tmp_path: Path) -> None:
    bodies = {f"folder/{n}": b"%d" % n * 5000 for n in range(20)}
    s3, login = start_s3(tmp_path)
    with _opened(login.put_in(Settings())) as store:
        for key, body in bodies.items():
            store.put_new(key, body)
    _kill(s3)
    s3.stop(0)

    again, login_again = start_s3(tmp_path)

    with _opened(login_again.put_in(Settings())) as store:
        found = {key: store.get(key) for key, _ in store.list("folder/")}
    again.stop(0)
    assert found == bodies
    assert dataclasses.replace(login_again, endpoint=login.endpoint) == login


def test_redis_wants_its_password(redis_url: str) -> None:
    _, _, address = redis_url.partition("@")
    for url in (f"redis://{address}", f"redis://:wrong@{address}"):
        settings = Settings(redis_url=url)
        with open_redis(settings) as client, pytest.raises(AccessDenied):
            check_redis(client, settings)


def test_s3_wants_its_keys(settings: Settings) -> None:
    for changes in ({"s3_access_key": "nobody"}, {"s3_secret_key": "wrong"}):
        wrong = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        with _opened(wrong) as store, pytest.raises(AccessDenied):
            store.check()


def test_secrets_are_in_private_files_and_in_no_command_line(
    services_dir: Path, settings: Settings
) -> None:
    _, _, password = settings.redis_url.partition("@")[0].rpartition(":")
    secrets = [password, settings.s3_access_key, settings.s3_secret_key]

    holders = [
        path
        for home in ("redis", "s3")
        for path in (services_dir / home).iterdir()
        if path.is_file() and any(s.encode() in path.read_bytes() for s in secrets)
    ]

    assert {path.name for path in holders} == {
        "password.json",
        "redis.conf",
        "keys.json",
        "identities.json",
    }
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    command_lines = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    assert not [line for line in command_lines if any(s in line for s in secrets)]


def test_servers_listen_on_loopback_only(settings: Settings) -> None:
    children = psutil.Process().children(recursive=True)

    listening = [
        connection.laddr.ip
        for process in children
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert len(listening) >= 9  # Redis, and eight of SeaweedFS
    assert set(listening) == {"127.0.0.1"}


def test_a_port_that_is_taken_meanwhile_is_given_up_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (free,) = embedded.free_ports(1)
        offers = iter([[taken.getsockname()[1]], [free]])
        monkeypatch.setattr(embedded, "free_ports", lambda count: next(offers))

        redis, url = start_redis(tmp_path)

    redis.stop()
    assert f":{free}/" in url


def test_a_server_that_dies_at_start_is_reported_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_program(tmp_path / "bin" / "redis-server", "echo cannot open the thing; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    with pytest.raises(NotEnough, match=r"Redis died at start.*\ncannot open the thing"):
        start_redis(tmp_path)


def test_a_server_that_never_answers_is_reported_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_program(tmp_path / "bin" / "redis-server", "echo thinking; sleep 300")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(embedded, "REDIS_TIMEOUT_S", 0.5)
    before = psutil.Process().children()

    with pytest.raises(NotEnough, match=r"not ready after 0.5 s(.|\n)*\nthinking"):
        start_redis(tmp_path)

    assert psutil.Process().children() == before


def test_a_missing_program_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")

    with pytest.raises(Missing, match=r"dflash-fleet\[embedded\]"):
        start_s3(tmp_path)


def test_a_full_disk_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(embedded, "FREE_DISK_BYTES", usage.total)

    with pytest.raises(NotEnough, match="MiB of disk free"):
        start_redis(tmp_path)


def test_what_is_external_is_left_as_it_was(tmp_path: Path) -> None:
    given = Settings(redis_url="redis://elsewhere/0", s3_endpoint="http://elsewhere")

    with embedded_services(tmp_path, given, external_redis=True, external_s3=True) as settings:
        assert settings == given


@pytest.mark.slow
def test_embedded_services_end_with_the_block(tmp_path: Path) -> None:
    before = psutil.Process().children()

    with (
        embedded_services(
            tmp_path, Settings(s3_bucket="mine"), external_redis=False, external_s3=False
        ) as settings,
        _opened(settings) as store,
        open_redis(settings) as client,
    ):
        store.check()
        check_redis(client, settings)

    assert psutil.Process().children() == before


@contextmanager
def _opened(settings: Settings) -> Iterator[Store]:
    store = open_store(settings, max_attempts=1)
    try:
        yield store
    finally:
        store.client.close()


def _kill(child: Child) -> None:
    psutil.Process(child.pid).kill()
    assert child.wait(10) == -signal.SIGKILL


def _put_program(path: Path, script: str) -> None:
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
