"""The workers' verbs as a person calls them."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from dflash_workers import cli
from dflash_workers.cli import app
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings


@pytest.mark.parametrize("verb", ["worker"])
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
    monkeypatch.setattr(cli, "_run_celery", lambda *_: 0)
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
