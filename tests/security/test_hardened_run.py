"""What a run leaves behind holds no secret and obeys no prompt; an ACL user over TLS is enough."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import start_s3
from tests.fake_engine import FakeEngine
from tests.security.conftest import REDIS_PASSWORD
from tests.security.hardened_run import FORGED, NUM_REFUSED, PROMPTS, Evidence, HardenedRun
from tests.security.searching import traces
from tests.security.tls_redis import TlsRedis

pytestmark = pytest.mark.slow

SECRETS = {
    "Redis' password": REDIS_PASSWORD,
    "the access key": "CANARYACCESSKEYOFS3X",
    "the secret key": "CanarySecretKeyOfS3/abc+defghijklmnopqrs",
    "Flower's password": "CanaryPasswordOfFlower",
}
BUCKET = "guarded"


@pytest.fixture(scope="module")
def settings(
    tmp_path_factory: pytest.TempPathFactory, tls_redis: TlsRedis, model_dir: Path
) -> Iterator[Settings]:
    """Of a fleet whose every secret can be looked for."""
    folder = tmp_path_factory.mktemp("services")
    keys = {"access_key": SECRETS["the access key"], "secret_key": SECRETS["the secret key"]}
    (folder / "s3").mkdir()
    (folder / "s3" / "keys.json").write_text(json.dumps(keys))
    child, login = start_s3(folder, BUCKET)
    yield login.put_in(
        Settings(
            redis_url=tls_redis.url(trusted=tls_redis.authority.certificate),
            s3_bucket=BUCKET,
            s3_prefix="fleet",
            model=str(model_dir),
            flower_login="admin:" + SECRETS["Flower's password"],
        )
    )
    child.stop(0)


@pytest.fixture(scope="module")
def evidence(
    tmp_path_factory: pytest.TempPathFactory,
    settings: Settings,
    tls_redis: TlsRedis,
    model_dir: Path,
) -> Iterator[Evidence]:
    """What one run left behind."""
    folder = tmp_path_factory.mktemp("run")
    with FakeEngine(load_tokenizer(str(model_dir))) as engine:
        reached = dataclasses.replace(settings, engine_url=engine.url)
        yield HardenedRun(folder, reached, tls_redis).go()


def test_a_run_goes_through_over_tls_as_a_user_with_few_rights(
    evidence: Evidence, tls_redis: TlsRedis
) -> None:
    assert evidence.facts["total"] == len(PROMPTS)
    assert evidence.facts["completed"] == len(PROMPTS) - NUM_REFUSED

    assert [entry["object"] for entry in tls_redis.denied() if entry["reason"] != "auth"] == []


def test_no_id_becomes_a_part_of_a_key(evidence: Evidence) -> None:
    shape = re.compile(r"[\w./-]+")

    strange = [key for key in evidence.s3 if not shape.fullmatch(key) or ".." in key]

    assert len(evidence.s3) > 5
    assert strange == []


def test_no_id_forges_a_line_or_moves_a_cursor(evidence: Evidence) -> None:
    for name, body in evidence.printed.items():
        lines = body.decode().splitlines()
        assert not any(line.startswith(FORGED) for line in lines), name
        assert b"\x1b" not in body, name


@pytest.mark.parametrize("where", ["redis", "s3", "printed", "pages", "command_lines"])
def test_no_secret_is_in(where: str, evidence: Evidence) -> None:
    places: dict[str, bytes] = getattr(evidence, where)

    assert sum(map(len, places.values())) > 200, "nothing was looked at"
    assert traces(SECRETS, places) == []


def test_a_workers_numbers_are_among_what_was_looked_at(evidence: Evidence) -> None:
    assert b"dflash_worker_replies_total" in evidence.pages["a worker's /metrics"]


def test_flower_shows_nothing_without_its_login(evidence: Evidence) -> None:
    open_pages = {page for page, status in evidence.statuses.items() if status == 200}

    assert open_pages == {"/metrics", "/healthcheck"}
    assert b"Flower" in evidence.pages["/workers"]


def test_the_search_finds_what_is_hidden() -> None:
    secret = "CanaryToBeFound"
    hidden = {
        "plain": b"x" + secret.encode(),
        "base64": base64.b64encode(b"user:" + secret.encode() + b"@host"),
        "zstd": b"noise" + zstandard.compress(b"{" + secret.encode() + b"}"),
    }

    found = traces({"it": secret}, hidden)

    assert {line.rpartition(" in ")[2] for line in found} == set(hidden)
    assert secret not in str(found)
