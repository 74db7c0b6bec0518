"""The verbs `gate` and `show`, as they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from fleet import app
from tests.tiny_model import make_tiny_model
from tests.trainer.cli.calling import call
from tests.trainer.gate.making import RUN, STOP, healthy, put_plan, put_run, sample_of
from tests.trainer.gate.pages import assert_harmless
from tests.trainer.online.growing import GrowingRun, renamed, spec_of
from trainer.tokens.shards import Sample


@pytest.fixture
def bad_run(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run half of whose answers are empty, and the environment that finds it."""
    for name, value in replace(settings, run=RUN).environment().items():
        monkeypatch.setenv(name, value)
    put_run(store, [half_empty()])
    return RUN


def half_empty() -> list[Sample]:
    return [*healthy(30), *[sample_of(n, [5 + n, 6, STOP]) for n in range(100, 130)]]


def test_a_run_that_fails_ends_with_exit_code_3_and_one_that_is_overridden_with_0(
    bad_run: str,
) -> None:
    failed = call("gate", exit_code=3)
    passed = call("gate", "--override", "empty_answers", exit_code=0)

    outcomes = [{v["rule"]: v["outcome"] for v in f["verdicts"]} for f in (failed, passed)]
    assert (failed["run"], failed["passed"], passed["passed"]) == (bad_run, False, True)
    assert [o["empty_answers"] for o in outcomes] == ["fail", "overridden"]
    assert failed["num_samples"] == 60


def test_a_run_without_shards_is_no_run_that_passed(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in replace(settings, run=RUN).environment().items():
        monkeypatch.setenv(name, value)
    put_run(store, [])

    with pytest.raises(NotEnough, match="has `tokenize` run"):
        CliRunner().invoke(app, ["gate"], catch_exceptions=False)


def test_people_see_the_rules_with_their_counts(bad_run: str, tmp_path: Path) -> None:
    page = tmp_path / "gate.html"
    benchmark = tmp_path / "b.jsonl"
    benchmark.write_text('{"question": "one two three four five six seven eight"}\n')

    arguments = ["gate", "--html", str(page), "--benchmark", str(benchmark)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert result.exit_code == 3
    assert "30 of 60 (50.0%) of the answers have no content" in result.stdout
    assert "too few to judge: 60 of 100" in result.stdout
    assert_harmless(page.read_text(encoding="utf-8"))


def test_a_page_that_can_not_be_written_is_named(bad_run: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--html"):
        CliRunner().invoke(app, ["gate", "--html", str(tmp_path)], catch_exceptions=False)


def test_a_sample_is_shown_as_text_as_html_and_as_json(
    bad_run: str, store: Store, tmp_path: Path
) -> None:
    put_plan(store, [healthy(30)])
    model, page = str(make_tiny_model(tmp_path / "model")), tmp_path / "s.html"
    arguments = ["show", healthy(4)[3].prompt_key, "--model", model, "--html", str(page)]

    text = CliRunner().invoke(app, arguments, catch_exceptions=False)
    facts = call(*arguments)

    (found,) = facts["samples"]
    ids = healthy(4)[3].ids.tolist()
    assert text.exit_code == 0
    assert "num loss tokens" in text.stdout
    assert [i for piece in found["pieces"] for i in piece["ids"]] == ids
    assert_harmless(page.read_text(encoding="utf-8"))


def test_training_on_a_run_that_fails_needs_an_override(
    store: Store,
    settings: Settings,
    qwen_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in replace(settings, run=RUN).environment().items():
        monkeypatch.setenv(name, value)
    run = GrowingRun(store, 1, renamed(spec_of(qwen_dir), RUN))
    run.put(0, half_empty())
    run.seal()
    arguments = ["train", "--model", str(qwen_dir), "--out", str(tmp_path / "out")]
    arguments += ["--set", "num_steps=1"]

    with pytest.raises(NotEnough, match="--override empty_answers"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert call(*arguments, "--override", "empty_answers")["num_steps"] == 1
