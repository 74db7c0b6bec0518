"""Certificates, and a Redis that takes nothing but TLS."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.certificates import Authority, make_authority, make_certificate
from tests.security.tls_redis import TlsRedis
from tests.tiny_model import make_tiny_model

REDIS_PASSWORD = "CanaryOfRedis/Z2F+c0"  # with signs that a URL has to escape


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer can be loaded."""
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one whose servers are trusted."""
    return make_authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that signed none of our servers' certificates."""
    return make_authority(tmp_path_factory.mktemp("other-authority"), "another")


@pytest.fixture(scope="module")
def tls_redis(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[TlsRedis]:
    """One for a file's tests."""
    assert shutil.which("redis-server"), "apt-get install redis-server"
    folder = tmp_path_factory.mktemp("tls")
    certificate = make_certificate(folder, authority, "IP:127.0.0.1")
    redis = TlsRedis(folder, authority, certificate, REDIS_PASSWORD)
    redis.start()
    yield redis
    redis.close()
