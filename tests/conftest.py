"""What every test may ask for: a real Redis, a real S3, and settings that reach nobody else's.

One Redis and one SeaweedFS serve all tests of a process (`pytest -n` has several); each test has a
prefix of its own in both, so no test sees another's keys. Where one can't be had: skipped at home,
failed with CI=true.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from filelock import FileLock

from dflash_workers.contract.errors import FleetError, Missing
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.embedded import S3Login, start_redis, start_s3
from dflash_workers.engine_venv import MARKER
from dflash_workers.staging import stage_smollm2

# Whoever starts tests in the background of a shell has these ignored, by every child as well.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

BUCKET = "dflash-tests"
ENGINE_VENV = Path(__file__).parents[1] / ".venv-engine"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts SGLang, which computes on every core, is alone; files that take long begin first,
    so that no process of `pytest -n` is left with one when the others have ended."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)
    for item in items:
        if isinstance(item, pytest.Function) and "engine_python" in item.fixturenames:
            item.add_marker("alone")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the person at the keyboard has exported."""
    for name in [n for n in os.environ if n.startswith("DFLASH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def services_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the session's servers."""
    return tmp_path_factory.mktemp("services")


@pytest.fixture(scope="session")
def redis_url(services_dir: Path) -> Iterator[str]:
    """The session's Redis."""
    try:
        child, url = start_redis(services_dir)
    except FleetError as error:
        _skip_at_home(error)
    with child:
        yield url


@pytest.fixture(scope="session")
def s3_login(services_dir: Path) -> Iterator[S3Login]:
    """The session's S3, with the bucket made."""
    try:
        child, login = start_s3(services_dir, BUCKET)
    except FleetError as error:
        _skip_at_home(error)
    yield login
    child.stop(0)


@pytest.fixture
def redis_settings(redis_url: str) -> Settings:
    """Settings of this test alone that reach Redis only."""
    name = uuid.uuid4().hex[:12]
    return Settings(
        redis_url=redis_url,
        redis_prefix=f"test-{name}:",
        s3_bucket=BUCKET,
        s3_prefix=f"test-{name}",
        run=f"run-{name}",
        slot=f"slot-{name}",
    )


@pytest.fixture
def settings(redis_settings: Settings, s3_login: S3Login) -> Settings:
    """Settings of this test alone that reach Redis and S3."""
    return s3_login.put_in(redis_settings)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """This test's part of the bucket."""
    store = open_store(settings)
    yield store
    store.client.close()


@pytest.fixture
def redis_client(redis_settings: Settings) -> Iterator[redis.Redis]:
    """A client of the session's Redis; keys are kept apart by `settings.redis_prefix`."""
    with open_redis(redis_settings) as client:
        yield client


@pytest.fixture
def hints(redis_settings: Settings) -> Iterator[Hints]:
    """This test's sender of hints. Its queues are the test's own if the target is (see `run`)."""
    hints = open_hints(redis_settings)
    yield hints
    hints.app.close()
    hints.redis.close()


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run that all its processes share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def smollm2_dir(shared_dir: Path) -> Path:
    """A small real model (bfloat16). Takes half a minute or more: for slow tests only."""
    try:
        with FileLock(shared_dir / "smollm2.lock"):
            return stage_smollm2(shared_dir / "smollm2")
    except FleetError as error:
        _skip_at_home(error)


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The interpreter of the engine's own venv."""
    python = ENGINE_VENV / "bin" / "python"
    if not (ENGINE_VENV / MARKER).is_file():
        _skip_at_home(Missing(f"no engine: python -m dflash_workers.engine_venv {ENGINE_VENV}"))
    return python


def _skip_at_home(error: FleetError) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(str(error))
    pytest.skip(str(error))
