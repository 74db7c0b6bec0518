"""The report of a run: true to what S3 and Redis hold, and harmless in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import orjson
import pytest
import redis
from typer.testing import CliRunner

from dflash_workers.contract.errors import Missing, NotEnough
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.browser import render
from tests.trainer.gate.pages import assert_harmless, parsed
from tests.trainer.report.finished_run import (
    ANSWER_S,
    ANSWER_TOKENS,
    BATCH_S,
    HOSTILE,
    HOSTILE_NAME,
    NUM_BATCHES,
    ROWS,
    FinishedRun,
)
from trainer.cli.report import app
from trainer.report.gathering import Facts, gather
from trainer.report.page import page_of
from trainer.report.series import mean_in_flight, rates


@pytest.fixture
def run(store: Store, settings: Settings) -> str:
    FinishedRun(store, settings.run).write()
    return settings.run


@pytest.fixture
def facts(store: Store, run: str) -> Facts:
    return gather(store, run, lambda *_: None)


def test_every_sum_is_the_runs(facts: Facts) -> None:
    assert (facts.completed, facts.rejections.total()) == (NUM_BATCHES * ROWS, NUM_BATCHES)
    assert facts.rejections == {HOSTILE: 1, "poison": NUM_BATCHES - 1}
    assert facts.output_tokens == NUM_BATCHES * ROWS * ANSWER_TOKENS
    assert facts.notes == {"made_again_tokens": 50}
    assert facts.num_unused == 1
    assert (facts.plan.num_prompts, facts.plan.num_refused, facts.plan.is_sealed) == (32, 5, True)
    assert facts.busy.gpu_hours() == pytest.approx(2 * 4 * BATCH_S / 3600)
    assert facts.cost_usd == {"h200": pytest.approx(3.0 * 8 * BATCH_S / 3600)}
    assert facts.answers.num_continued == NUM_BATCHES
    assert [step["step"] for step in facts.training[HOSTILE_NAME]] == [0, 1, 2]


def test_the_engines_mean_of_running_requests_is_what_littles_law_says(facts: Facts) -> None:
    answers_s = NUM_BATCHES * ROWS * ANSWER_S

    assert mean_in_flight(facts) == pytest.approx(answers_s / (NUM_BATCHES * BATCH_S))


def test_of_a_long_run_some_data_objects_are_read_evenly_and_the_page_says_how_many(
    store: Store, run: str
) -> None:
    facts = gather(store, run, lambda *_: None, num_sampled=3)

    assert facts.answers.num_objects == 3
    assert len(facts.answers.output_tokens) == 3 * ROWS
    assert mean_in_flight(facts) == pytest.approx(ROWS * ANSWER_S / BATCH_S)
    assert "from 3 data objects" in page_of(facts)


def test_the_area_under_the_rate_is_what_was_made(facts: Facts) -> None:
    prompts, tokens, workers = rates(facts)
    part_s = 4 * BATCH_S / len(prompts)

    assert sum(y for _, y in prompts) * part_s / 60 == pytest.approx(NUM_BATCHES * (ROWS + 1))
    assert sum(y for _, y in tokens) * part_s == pytest.approx(facts.output_tokens)
    assert {y for _, y in workers} == {2.0}


def test_a_run_that_is_not_there_or_has_no_commit_is_said(store: Store, run: str) -> None:
    with pytest.raises(Missing, match="there is no run 'other'"):
        gather(store, "other", lambda *_: None)

    store.put_new(RunKeys("fresh").spec, store.get(RunKeys(run).spec))
    with pytest.raises(NotEnough, match="no commit yet"):
        gather(store, "fresh", lambda *_: None)


def test_the_page_loads_and_runs_nothing_whatever_the_data_say(facts: Facts) -> None:
    page = page_of(facts)

    assert_harmless(page)
    text = parsed(page).text
    for words in ("24 completed, 8 rejected", "4.00 USD as h200", "1 data objects", "50 tokens"):
        assert words in text


def test_the_verb_writes_what_a_browser_shows(
    run: str,
    store: Store,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: redis.Redis,
    hints: Hints,
) -> None:
    monkeypatch.setattr("tests.trainer.report.finished_run.START_S", time.time())
    FinishedRun(store, f"{run}-now").write()
    FinishedRun(store, run).write_events(redis_client, hints)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.5}\n')
    environ = settings.environment() | {"DFLASH_RUN": f"{run}-now"}
    page = tmp_path / "report.html"

    done = CliRunner().invoke(
        app, ["--html", str(page), "--training", str(tmp_path), "--json"], env=environ
    )
    shown = render(
        page.as_uri(),
        questions={
            "figures": "document.querySelectorAll('figure svg').length",
            "curves": "[...document.querySelectorAll('polyline')]"
            ".filter(line => line.getBoundingClientRect().width > 100).length",
            "died": "document.querySelectorAll('circle.died').length",
            "text": "document.body.innerText",
            "wide": "document.documentElement.scrollWidth <= window.innerWidth",
        },
    )

    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    assert (told["completed"], told["passed_gate"], len(told["trainers"])) == (24, None, 2)
    assert shown.console == []
    assert shown.answers["figures"] >= 12
    assert shown.answers["curves"] >= 6
    assert shown.answers["died"] == 1
    assert shown.answers["wide"]
    assert "75.0% on average, once a minute" in shown.answers["text"]
    assert "1 joined, 0 left, 1 died" in shown.answers["text"]


def test_without_redis_the_report_is_made_and_says_what_it_lacks(
    run: str, settings: Settings, tmp_path: Path
) -> None:
    environ = settings.environment() | {"DFLASH_REDIS_URL": "redis://127.0.0.1:1/0"}
    page = tmp_path / "report.html"

    done = CliRunner().invoke(app, ["--html", str(page), "--no-gate"], env=environ)

    assert done.exit_code == 0, done.output
    assert "Redis could not be asked" in page.read_text()
