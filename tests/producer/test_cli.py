from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from producer.cli import app, share
from tests.producer.conftest import RowsFile
from tests.producer.test_enqueue import rows

ROOT = Path(__file__).parents[2]
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
    """A verb in this process, with --json: exit code and report."""
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


@pytest.mark.usefixtures("environment")
def test_too_many_bad_rows_plan_nothing(rows_file: RowsFile) -> None:
    with pytest.raises(BadInput, match="over the limit"):
        verb("enqueue", rows_file(BAD), "--max-bad", "1%")

    assert verb("audit")[1]["num_planned"] == 0


@pytest.mark.usefixtures("environment")
def test_verbs_report_what_the_run_holds(rows_file: RowsFile, environment: Settings) -> None:
    file = rows_file(BAD)

    assert verb("enqueue", file, "--dry-run")[1]["num_planned"] == 2
    assert verb("enqueue", file, "--max-tokens", "64")[1]["num_planned"] == 2
    assert verb("seal")[1]["sealed"] is True
    assert verb("rejected")[1]["refused"] == {"no_messages": 1}
    code, facts = verb("audit")
    assert (code, facts["num_waiting"], facts["findings"]) == (3, 2, [])
    listed = verb("runs")[1]["runs"]
    assert listed == {
        environment.run: {
            "target": "tiny",
            "num_prompts": 2,
            "num_prompts_done": 0,
            "num_batches": 1,
            "num_batches_done": 0,
            "sealed": True,
        }
    }


@pytest.mark.usefixtures("environment")
def test_reports_for_people_are_words(rows_file: RowsFile) -> None:
    result = CliRunner().invoke(app, ["enqueue", str(rows_file(BAD))], catch_exceptions=False)

    assert "no messages 1" in result.stdout
    assert "num planned" in result.stdout


@pytest.mark.parametrize("name", ["enqueue", "seal", "reconcile", "rejected", "audit", "runs"])
def test_every_verb_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])

    assert result.exit_code == 0
    assert f"Example: dflash-fleet {name}" in result.stdout


@pytest.mark.parametrize(("text", "value"), [("8%", 0.08), ("0.08", 0.08), ("0", 0), ("100%", 1)])
def test_a_share_is_a_percentage_or_a_fraction(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["8", "-1%", "101%", "some", "nan"])
def test_what_is_no_share_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        share(text)
