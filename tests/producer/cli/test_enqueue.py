from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.cli.enqueue import app
from producer.listing import list_runs
from producer.rejected import rejections
from tests.producer.conftest import RowsFile

ROOT = Path(__file__).parents[3]


def rows(num_rows: int) -> list[Json]:
    return [{"id": f"p{n}", "user_turns": [f"question {n}"]} for n in range(num_rows)]


GOOD, BAD = rows(10), [*rows(2), {"id": "bad"}]


@pytest.fixture
def environment(settings: Settings, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings, where a process looks for them."""
    for variable, value in settings.environment().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("DFLASH_MODEL", str(model_dir))
    return settings


def fleet(*arguments: str | Path, stdin: bytes = b"") -> tuple[int, str, str]:
    """The command in a process of its own: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "fleet", *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def verb(*arguments: str | Path) -> tuple[int, Json]:
    """The verb in this process, with --json: exit code and report."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_exit_code_says_whether_rows_were_refused(rows_file: RowsFile) -> None:
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in GOOD)

    good = fleet("enqueue", "-", "--batch-size", "4", "--json", stdin=lines)
    bad = fleet("enqueue", rows_file(BAD), "--batch-size", "4", "--seal", "--json")

    assert good[0] == 0, good[2]
    assert json.loads(good[1])["num_planned"] == 10
    assert json.loads(good[1])["num_sent"] == 3
    assert bad[0] == 3, bad[2]
    assert json.loads(bad[1])["refused"] == {"no_messages": 1}
    assert json.loads(bad[1])["num_duplicates"] == 2


@pytest.mark.slow
def test_what_can_not_be_done_is_one_clear_line_and_exit_1(
    environment: Settings, rows_file: RowsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rows_file(GOOD)
    wrong_password = environment.redis_url.replace("@", "wrong@")

    cases = {
        "no such file": fleet("enqueue", tmp_path / "gone.jsonl"),
        "no model folder": fleet("enqueue", file, "--model", tmp_path / "gone"),
        "there is no run 'gone'": fleet("audit", "--run", "gone"),
    }
    monkeypatch.setenv("DFLASH_REDIS_URL", wrong_password)
    cases["password"] = fleet("enqueue", file, "--run", "another")
    monkeypatch.setenv("DFLASH_S3_ENDPOINT", "http://127.0.0.1:9")
    cases["is it running"] = fleet("enqueue", file)

    for words, (code, out, err) in cases.items():
        assert (code, out) == (1, ""), err
        assert words in err
        assert err.count("\n") == 1
        assert "wrong@" not in err


def test_too_many_bad_rows_plan_nothing(
    rows_file: RowsFile, environment: Settings, store: Store
) -> None:
    with pytest.raises(BadInput, match="refused"):
        verb(rows_file(BAD), "--max-bad", "1%")

    listed = list_runs(store)
    assert listed.get(environment.run, {"num_prompts": 0})["num_prompts"] == 0


def test_a_refused_row_is_on_record(
    rows_file: RowsFile, environment: Settings, store: Store
) -> None:
    code, facts = verb(rows_file(BAD))

    assert (code, facts["num_planned"]) == (3, 2)
    refused, _ = rejections(store, environment.run)
    assert refused == {"no_messages": 1}


def test_rows_of_a_paused_run_are_planned_and_not_sent_and_that_is_said(
    rows_file: RowsFile, environment: Settings, store: Store
) -> None:
    path, control = rows_file(GOOD), Control(store, environment.run)
    verb(rows_file(BAD, "first.jsonl"))
    control.order(Action.PAUSE)

    paused = CliRunner().invoke(app, [str(path), "--json"], catch_exceptions=False)
    control.order(Action.CANCEL)

    found = json.loads(paused.stdout)
    assert (found["num_planned"], found["num_sent"], found["state"]) == (8, 0, "paused")
    assert f"dflash-fleet resume --run {environment.run}" in paused.stderr
    with pytest.raises(Conflict, match="is cancelled"):
        verb(path)


@pytest.mark.usefixtures("environment")
def test_reports_for_people_are_words(rows_file: RowsFile) -> None:
    result = CliRunner().invoke(app, [str(rows_file(BAD))], catch_exceptions=False)

    assert "no messages 1" in result.stdout
    assert "num planned" in result.stdout


def test_the_verb_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["--help"])

    assert result.exit_code == 0
    assert "Example: dflash-fleet enqueue" in result.stdout


def test_a_dry_run_shows_what_would_be_planned_and_touches_nothing(
    rows_file: RowsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("DFLASH_REDIS_URL", "redis://127.0.0.1:9/0")
    path = rows_file([*BAD, {"question": "Why?"}])

    code, found = verb(path, "--dry-run")
    people = CliRunner().invoke(app, [str(path), "--dry-run"], catch_exceptions=False)

    assert (code, people.exit_code) == (3, 3)
    assert (found["num_planned"], found["refused"]) == (3, {"no_messages": 1})
    assert found["schemas"] == {"user_turns": 2, "prompt": 1}
    assert [refusal["source"] for refusal in found["first_refusals"]] == [f"{path}:3"]
    assert found["prompts"][0]["turns"][0]["messages"][0]["content"] == "question 0"
    assert "user turns 2, prompt 1" in people.output
    assert f"{path}:3: no_messages" in people.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weight", "other.jsonl=2"], "none of the inputs"),
        (["--samples", "100000"], "samples"),
        (["--priority", "urgent"], "urgent"),
        (["--schema", "chat"], "unknown schema"),
        (["--multi-turn", "all"], "all"),
    ],
)
def test_a_flag_that_means_nothing_is_told(
    flags: list[str], words: str, rows_file: RowsFile
) -> None:
    with pytest.raises(BadInput, match=words):
        verb(rows_file(GOOD), "--dry-run", *flags)
