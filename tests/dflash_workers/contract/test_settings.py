"""Settings: who wins, what is refused, and that no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, BadUsage
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.settings import Settings, load_settings


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "dflash.toml"
    config.write_text('s3_bucket = "file"\ns3_region = "file"\nrun = "file"\nmax_in_flight = 7\n')
    environ = {"DFLASH_S3_REGION": "environment", "DFLASH_RUN": "environment", "PATH": "/bin"}

    settings = load_settings({"run": "flag"}, environ, config)

    assert (settings.s3_bucket, settings.s3_region, settings.run) == ("file", "environment", "flag")
    assert settings.max_in_flight == 7


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_flag_that_was_not_given_hides_nothing(tmp_path: Path, nothing: object) -> None:
    settings = load_settings({"run": nothing}, {"DFLASH_RUN": "kept"}, tmp_path / "none.toml")

    assert settings.run == "kept"


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    assert load_settings({}, {}, tmp_path / "none.toml") == Settings()


@pytest.mark.parametrize(
    "config",
    [
        "nonsense = 1",
        "[s3]\nbucket = 'b'",
        "s3_bucket = ['b']",
        "s3_bucket = {name = 'b'}",
        "max_in_flight = 'many'",
        "max_in_flight = 4.5",
        "max_in_flight = true",
        "max_in_flight = 0",
        "engine_dialect = 'ollama'",
        "run = '../escape'",
        "run = 'a/b'",
        "s3_bucket = ",
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path: Path, config: str) -> None:
    path = tmp_path / "dflash.toml"
    path.write_text(config)

    with pytest.raises(BadInput):
        load_settings({}, {}, path)


def test_a_config_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dflash.toml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(BadInput):
        load_settings({}, {}, path)


@pytest.mark.parametrize(
    "environ",
    [{"DFLASH_BUCKET": "b"}, {"DFLASH_MAX_IN_FLIGHT": "x"}, {"DFLASH_MAX_IN_FLIGHT": "-1"}],
)
def test_a_wrong_variable_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        load_settings({}, environ, tmp_path / "none.toml")


def test_a_variable_that_another_place_reads_is_no_error(tmp_path: Path) -> None:
    environ = {"DFLASH_DEBUG": "1"}

    assert load_settings({}, environ, tmp_path / "none.toml") == Settings()


def test_a_child_process_gets_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(run="r", max_in_flight=3, s3_secret_key="secret", redis_url="redis://x:1/2")

    assert load_settings({}, settings.environment(), tmp_path / "none.toml") == settings


def test_no_secret_is_in_a_repr() -> None:
    settings = Settings(
        redis_url="redis://user:hush@host/0", s3_access_key="hush", s3_secret_key="hush"
    )

    assert "hush" not in repr(settings)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:hush@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://user:hush@host/0", "rediss://***@host/0"),
        ("redis://:hu@sh@host/0", "redis://***@host/0"),
        ("redis://:hu/sh@host/0", "redis://***@host/0"),
        ("redis:/:hush@host/0", "***@host/0"),  # as people mistype it
        ("redis://host/0?password=hush", "redis://host/0"),
        ("unix://:hush@/run/redis.sock?db=1", "unix://***@/run/redis.sock"),
    ],
)
def test_a_redis_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert Settings(redis_url=url).public_redis_url() == shown


def test_a_verb_that_needs_a_run_says_how_to_give_one() -> None:
    assert Settings(run="r").require_run() == "r"
    with pytest.raises(BadInput, match="--run"):
        Settings().require_run()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:se/cret@127.0.0.1:1/0",
        "redis://h:1/0?foo=cret",
        "redis://:cret@h:1/abc",
        "rediss://h:1/0/1",
        "redis://[h:1/0",
    ],
)
def test_a_redis_url_that_is_none_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(BadUsage, match="is no Redis URL") as refused:
        open_redis(Settings(redis_url=url))

    assert "cret" not in str(refused.value)
    assert "'se'" not in str(refused.value)


@pytest.mark.parametrize("path", ["", "/", "/0", "/15", "?db=3", "/2?db=3"])
def test_a_redis_url_may_name_its_database_or_none(path: str) -> None:
    with open_redis(Settings(redis_url=f"redis://h:1{path}")) as client:
        database = client.connection_pool.connection_kwargs.get("db", 0)

    assert database == int(path.rpartition("=")[2].strip("/") or 0)


def test_a_slot_is_a_plain_name() -> None:
    with pytest.raises(BadInput, match="slot"):
        Settings(slot="a%b c")
