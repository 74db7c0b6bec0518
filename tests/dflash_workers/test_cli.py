"""The workers' verbs as a person calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import orjson
import pytest
from typer.testing import CliRunner

from dflash_workers import cli
from dflash_workers.claims import Timing
from dflash_workers.cli import app
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.settings import Settings
from dflash_workers.worker import Worker
from tests.dflash_workers.conftest import OPTIONS
from tests.planned import Plan, prompt


@pytest.mark.parametrize("verb", ["worker", "status", "flower"])
def test_every_verb_explains_itself_with_an_example(verb: str) -> None:
    shown = CliRunner().invoke(app, [verb, "--help"])

    assert shown.exit_code == 0
    assert "dflash-fleet " + verb in shown.output


def test_every_setting_of_a_worker_is_a_flag_or_a_variable_that_its_help_names() -> None:
    shown = CliRunner().invoke(app, ["worker", "--help"], env={"COLUMNS": "200"})

    not_the_workers = {"flower_login"}
    for setting in dataclasses.fields(Settings):
        flag, variable = f"--{setting.name.replace('_', '-')}", f"DFLASH_{setting.name.upper()}"
        assert flag in shown.output or variable in shown.output or setting.name in not_the_workers


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--engine-dialect", "ollama"], "engine_dialect 'ollama'"),
        (["--spot-provider", "hetzner"], "spot_provider 'hetzner'"),
        (["--spot-url", "ftp://elsewhere"], "spot_url 'ftp://elsewhere'"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_by_name(flags: list[str], refusal: str) -> None:
    shown = CliRunner().invoke(app, ["worker", *flags])

    assert isinstance(shown.exception, BadInput)
    assert refusal in str(shown.exception)


def test_flags_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Settings] = []
    monkeypatch.setattr(cli, "Worker", lambda settings, _options: opened.append(settings))
    monkeypatch.setattr(cli, "_run_celery", lambda _worker: 0)
    flags = ["--engine-dialect", "openai", "--spot-provider", "aws", "--spot-rebalance"]
    places = ["--spot-url", "http://127.0.0.1:9", "--spot-file", "/run/going"]

    shown = CliRunner().invoke(
        app, ["worker", *flags, *places], env={"DFLASH_SPOT_PROVIDER": "gcp"}
    )

    (settings,) = opened
    assert shown.exit_code == 0
    assert (settings.engine_dialect, settings.spot_provider) == ("openai", "aws")
    assert (settings.spot_rebalance, settings.spot_file) == (1, "/run/going")
    assert settings.spot_url == "http://127.0.0.1:9"


def test_status_says_what_s3_and_redis_know(
    plan: Plan, hints: Hints, settings: Settings, make_worker: Callable[..., Worker]
) -> None:
    messages = plan.add([prompt("say:a"), prompt("say:b")], [prompt("say:c")])
    hints.offer(messages, plan.queue)
    worker = make_worker("here", dataclasses.replace(OPTIONS, timing=Timing()))
    claim = worker.site.claims.claim(messages[0])
    assert claim is not None
    environ = {k: v for k, v in settings.environment().items() if v}

    shown = CliRunner().invoke(app, ["status", "--json"], env=environ)

    assert shown.exit_code == 0, shown.output
    facts = orjson.loads(shown.stdout)
    assert (facts["total"], facts["completed"], facts["failed"]) == (3, 0, 0)
    assert (facts["num_queued"], facts["num_pending"], facts["num_inflight"]) == (2, 1, 1)
    assert facts["status"] == "running"


def test_flower_never_starts_without_a_login(settings: Settings) -> None:
    environ = {k: v for k, v in settings.environment().items() if v}

    for login in ({}, {"DFLASH_FLOWER_LOGIN": "admin"}, {"DFLASH_FLOWER_LOGIN": "admin:"}):
        shown = CliRunner().invoke(app, ["flower"], env=environ | login)

        assert isinstance(shown.exception, BadInput)
        assert "DFLASH_FLOWER_LOGIN" in str(shown.exception)
