"""The verbs promote and drafters, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_workers.cli_promote import app
from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.provenance import MADE_WITH, made_with
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from tests.planned import Plan, prompt


@pytest.fixture
def planned(plan: Plan, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A run whose name and services stand in the environment."""
    plan.add([prompt("say:a")])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DFLASH_RUN", plan.spec.run)
    return plan


def export(folder: Path, provenance: Json) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return str(folder)


def call(*arguments: str) -> Json:
    outcome = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return dict(json.loads(outcome.stdout.splitlines()[-1]))


def test_what_was_decided_is_listed_the_latest_first(planned: Plan, tmp_path: Path) -> None:
    fit = {MADE_WITH: made_with(planned.spec)}
    first = call("promote", export(tmp_path / "one", fit), "--no-trial")["serves"]
    second = call("promote", export(tmp_path / "two", fit), "--no-trial")["serves"]
    call("promote", "--none")
    call("promote", first, "--no-trial")

    told = call("drafters")

    assert told["serves"] == first
    assert sorted(told["drafters"]) == sorted([first, second])
    assert [e["serves"] for e in told["history"]] == [first, "", second, first]
    lines = CliRunner().invoke(app, ["drafters"]).stdout.splitlines()
    assert lines[0].split() == ["serves", first]


def test_a_drafter_of_another_target_is_refused_unless_a_person_says_otherwise(
    planned: Plan, tmp_path: Path
) -> None:
    provenance = {MADE_WITH: made_with(planned.spec) | {"template_kwargs": {"thinking": 1}}}
    folder = export(tmp_path / "other", provenance)

    with pytest.raises(Conflict, match="template_kwargs"):
        call("promote", folder, "--no-trial")

    assert call("drafters")["history"] == []
    call("promote", folder, "--no-trial", "--override", "target")
    assert len(call("drafters")["history"]) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], BadInput),
        (["x", "--none"], BadInput),
        (["nowhere"], Missing),
        (["--none", "--override", "gate"], BadInput),
        (["--none", "--confidence", "2"], BadInput),
    ],
)
def test_what_means_nothing_is_refused(
    planned: Plan, arguments: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call("promote", *arguments)
