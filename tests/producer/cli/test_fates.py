from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal
from dflash_workers.contract.settings import Settings
from producer.cli.fates import app
from tests.producer.campaign import Campaign, prompts

REFUSALS = (Refusal("rows.jsonl:9", "no_messages", "", "{}"),)


@pytest.fixture
def judged(campaign: Campaign, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    """A run that the environment names: one answer, two rejections, one refused row."""
    for variable, value in settings.environment().items():
        monkeypatch.setenv(variable, value)
    (message,) = campaign.plan(prompts("a", "b", "c"), refusals=REFUSALS)
    campaign.commit(message, {"b": "context_length", "c": "poison"})
    return campaign


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def verb(*arguments: str) -> tuple[int, Json]:
    """A verb's exit code and report."""
    result = invoke(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_rejections_are_counted_by_reason(judged: Campaign) -> None:
    assert verb("rejected") == (
        0,
        {
            "run": judged.run,
            "refused": {"no_messages": 1},
            "rejected": {"context_length": 1, "poison": 1},
        },
    )
    assert verb("rejected", "--reason", "poison")[1]["rejected"] == {"poison": 1}


@pytest.mark.usefixtures("judged")
def test_rejections_are_exported_to_a_file_or_to_stdout_alone(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"

    code, found = verb("rejected", "--reason", "poison,no_messages", "--export", str(path))
    shown = invoke("rejected", "--reason", "poison", "--export", "-")

    reasons = [json.loads(line)["reason"] for line in path.read_bytes().splitlines()]
    assert (code, reasons) == (0, ["poison"])
    assert (found["refused"], found["rejected"]) == ({"no_messages": 1}, {"poison": 1})
    assert [json.loads(line)["id"] for line in shown.stdout.splitlines()] == ["c"]
    assert invoke("rejected", "--export", "-", "--json").exit_code == 2
    with pytest.raises(BadInput, match="can't be written"):
        verb("rejected", "--export", str(tmp_path))


@pytest.mark.usefixtures("judged")
def test_a_retry_without_a_reason_names_those_there_are() -> None:
    result = invoke("retry")

    assert result.exit_code == 2
    assert "context_length (1)" in result.output
    assert "poison (1)" in result.output


def test_a_retry_plans_once_what_its_reasons_name(judged: Campaign) -> None:
    command = ("retry", "--reason", "context_length,poison", "--max-tokens", "32")

    counted = verb(*command, "--dry-run")[1]
    code, planned = verb(*command)
    again = verb(*command)[1]

    assert counted["reasons"] == {"context_length": 1, "poison": 1}
    assert (counted["num_planned"], counted["dry_run"]) == (0, True)
    assert (code, planned["num_planned"], planned["num_sent"]) == (0, 2, 1)
    assert (again["num_rejected"], again["num_planned"], again["num_sent"]) == (0, 0, 0)
    assert judged.hints.num_queued(judged.queue) == 1


def test_the_audit_s_exit_code_is_its_verdict(judged: Campaign) -> None:
    whole, found = verb("audit")
    judged.plan(prompts("a"))

    broken, facts = verb("audit")
    shown = invoke("audit")

    assert (whole, found["findings"], found["num_prompts"]) == (0, [], 3)
    assert broken == 3
    assert ["'a': planned more than once" in finding for finding in facts["findings"]] == [True]
    assert "'a': planned more than once" in shown.stderr


@pytest.mark.parametrize(
    ("action", "state", "words"),
    [
        (Action.PAUSE, "paused", "the run is paused: 1 prompts wait for `dflash-fleet resume`"),
        (Action.CANCEL, "cancelled", "the run is cancelled: 1 prompts were never answered"),
    ],
)
def test_an_audit_says_that_nobody_works_on_the_run(
    judged: Campaign, action: Action, state: str, words: str
) -> None:
    judged.plan(prompts("d"))
    Control(judged.store, judged.run).order(action)

    code, found = verb("audit")

    assert (code, found["state"], found["num_waiting"]) == (3, state, 1)
    assert words in invoke("audit").stderr


@pytest.mark.usefixtures("judged")
def test_an_import_says_what_it_took_and_what_it_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows: list[Json] = [{"id": "x", "messages": messages}, {"id": "y", "messages": messages[:1]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    code, report = verb("import", str(path), "--heldout", "0")
    again, repeated = verb("import", str(path), "--heldout", "0")

    assert (code, report["num_planned"], report["num_committed"]) == (3, 1, 1)
    assert report["refused"] == {"unfinished": 1}
    assert (again, repeated["num_planned"], repeated["num_duplicates"]) == (3, 0, 1)
    assert verb("audit")[0] == 0


@pytest.mark.usefixtures("judged")
def test_a_pull_brings_files_and_again_only_what_is_new(tmp_path: Path) -> None:
    folder = str(tmp_path / "rows")

    first, again = verb("pull", folder), verb("pull", folder)

    assert (first[0], first[1]["num_files"], first[1]["num_rows"]) == (0, 1, 1)
    assert (again[1]["num_files"], again[1]["num_there"]) == (0, 1)
    assert invoke("pull", folder, "--as", "csv").exit_code == 2


@pytest.mark.parametrize("name", ["rejected", "retry", "audit", "import", "pull"])
def test_every_verb_shows_an_example(name: str) -> None:
    result = invoke(name, "--help")

    assert result.exit_code == 0
    assert f"Example: dflash-fleet {name}" in result.stdout
