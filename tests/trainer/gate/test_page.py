"""The report as HTML: well formed, complete, and deaf to whatever the data try."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import render
from tests.trainer.gate.making import RUN, SPEC, STOP, healthy, read_shard_of, sample_of, words
from tests.trainer.gate.pages import assert_harmless, parsed
from trainer.gate.benchmarks import Benchmarks
from trainer.gate.judge import Report, facts_of
from trainer.gate.page import page_of
from trainer.gate.rules import RULES, judge
from trainer.gate.tally import Tally

HOSTILE = "</td></svg><script>alert(1)</script><img src=http://evil/x onerror=go()>\"'&\x1b[31m\x00"


@pytest.fixture
def report() -> Report:
    """Of hostile data, with something of everything."""
    samples = [*[sample_of(n, [*range(9), STOP]) for n in range(1, 4)], *healthy(30, 10)]
    said = [
        words(HOSTILE, source=HOSTILE, asked="a b c d e f g h", num_tools=1),
        words("Слово", source="a.jsonl", num_tools=1, num_calls=1),
        *[words(source=f"{n}.jsonl") for n in range(31)],
    ]
    tally = Tally(SPEC, Benchmarks([(HOSTILE, "a b c d e f g h")]))
    tally.add(read_shard_of(samples, said, skipped={HOSTILE: 3}))
    tally.unreadable.append(HOSTILE)
    return Report(RUN, False, judge(tally.shares()), facts_of(tally))


def test_the_page_loads_and_runs_nothing_whatever_the_data_say(report: Report) -> None:
    assert_harmless(page_of(report))


def test_the_page_has_every_rule_with_its_verdict(report: Report) -> None:
    text = parsed(page_of(report)).text

    for rule, verdict in zip(RULES, report.verdicts, strict=True):
        assert rule.name in text
        assert f"{verdict.count:,} of {verdict.total:,}" in text or verdict.why_not in text
    assert "too few to judge: 33 of 100" in text
    assert "skipped: the run does not ask for thinking" in text
    assert "may NOT be trained on" in text


def test_the_plots_show_every_count(report: Report) -> None:
    page = page_of(report)

    assert page.count("<svg") >= 10
    text = parsed(page).text
    for name, count in report.facts["output_tokens"]["bins"].items():
        assert f"{name}: {count:,}" in text
    assert "Cyrillic" in text


def test_hostile_text_is_shown_as_what_it_is(report: Report) -> None:
    assert "<script>alert(1)</script>" in parsed(page_of(report)).text


def test_the_page_of_a_run_without_samples_is_well_formed() -> None:
    tally = Tally(SPEC)
    page = page_of(Report(RUN, True, judge(tally.shares()), facts_of(tally)))

    assert_harmless(page)
    assert "may be trained on" in page


def test_a_browser_shows_every_table_and_plot_and_runs_nothing(
    report: Report, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(report), encoding="utf-8")
    sizes = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().{})"
    questions = {
        "tables": sizes.format("table", "height"),
        "rows": "document.querySelectorAll('table')[0].rows.length",
        "plots": sizes.format("svg", "width"),
        "bars": sizes.format("svg rect", "width"),
        "too_wide": "document.documentElement.scrollWidth - window.innerWidth",
        "acting": "document.querySelectorAll('script, img, iframe, link, a').length",
        "text": "document.body.innerText",
    }

    page = render(path.as_uri(), questions=questions)

    seen = page.answers
    assert page.console == []
    assert seen["rows"] == len(RULES) + 1
    assert len(seen["tables"]) == 3 and min(seen["tables"]) > 50
    assert len(seen["plots"]) >= 10 and min(seen["plots"]) > 200
    assert len(seen["bars"]) > 20 and min(seen["bars"]) > 0
    assert seen["too_wide"] <= 0
    assert (seen["acting"], "<script>alert(1)</script>" in seen["text"]) == (0, True)


def test_a_page_can_be_written_as_utf_8(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "page.html"

    path.write_text(page_of(report), encoding="utf-8")

    assert path.stat().st_size < 100_000
