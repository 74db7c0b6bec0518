"""Over `rediss://` no server is believed whose certificate isn't right, on either road to Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import kombu.pools
import pytest

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.settings import Settings
from tests.security.certificates import Authority, make_certificate
from tests.security.tls_redis import TlsRedis

MESSAGE = BatchMessage("run", 0, "batch")


def by_commands(settings: Settings) -> None:
    """As claims, journal and status talk to Redis."""
    with open_redis(settings, timeout_s=5) as client:
        check_redis(client, settings)


def by_messages(settings: Settings) -> None:
    """As Celery does."""
    hints = open_hints(settings)
    hints.app.conf.broker_connection_timeout = 0.5  # for how long kombu tries again
    try:
        hints.tell_tokenizers([MESSAGE])
    finally:
        hints.app.close()
        hints.redis.close()


@pytest.fixture(autouse=True)
def fresh_connections() -> None:
    """kombu keeps connections by address, and forgets what each was told to trust."""
    kombu.pools.reset()


ROADS: list[Callable[[Settings], None]] = [by_commands, by_messages]


@pytest.mark.parametrize("road", ROADS)
def test_a_server_whose_authority_is_trusted_is_spoken_to(
    road: Callable[[Settings], None], tls_redis: TlsRedis, authority: Authority
) -> None:
    road(Settings(redis_url=tls_redis.url(trusted=authority.certificate)))


@pytest.mark.parametrize("road", ROADS)
def test_a_server_of_another_authority_is_refused(
    road: Callable[[Settings], None], tls_redis: TlsRedis, other_authority: Authority
) -> None:
    settings = Settings(redis_url=tls_redis.url(trusted=other_authority.certificate))

    with pytest.raises(QueueUnavailable, match=r"certificate verify failed"):
        road(settings)


@pytest.mark.parametrize("road", ROADS)
def test_a_server_that_no_authority_of_the_system_signed_is_refused(
    road: Callable[[Settings], None], tls_redis: TlsRedis
) -> None:
    with pytest.raises(QueueUnavailable, match=r"certificate verify failed"):
        road(Settings(redis_url=tls_redis.url()))


@pytest.fixture
def misnamed_redis(tmp_path: Path, authority: Authority) -> Iterator[TlsRedis]:
    """A trusted authority signed its certificate, for another host."""
    certificate = make_certificate(tmp_path, authority, "DNS:elsewhere.example")
    redis = TlsRedis(tmp_path, authority, certificate, "password")
    redis.start()
    yield redis
    redis.close()


@pytest.mark.parametrize("road", ROADS)
def test_a_certificate_of_another_host_is_refused(
    road: Callable[[Settings], None], misnamed_redis: TlsRedis, authority: Authority
) -> None:
    settings = Settings(redis_url=misnamed_redis.url(trusted=authority.certificate))

    with pytest.raises(QueueUnavailable, match=r"certificate verify failed"):
        road(settings)


@pytest.mark.parametrize("road", ROADS)
def test_a_url_without_tls_ends_in_an_error_and_not_in_waiting(
    road: Callable[[Settings], None], tls_redis: TlsRedis
) -> None:
    with pytest.raises(QueueUnavailable):
        road(Settings(redis_url=tls_redis.url(scheme="redis")))
