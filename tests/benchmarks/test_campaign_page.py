"""A campaign's page: what it shows, and that it loads nothing, whatever the result says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.campaign.page import page_of, rate_of, write_page
from benchmarks.campaign.result import (
    FaultSeen,
    Oracle,
    ProcessSeen,
    Recovery,
    Result,
    Series,
    Stage,
)
from benchmarks.figures import Figure

HOSTILE = '<script src="http://there/x.js">alert(1)</script><img src=//there/y>'
TIMES_S = [2.0 * n for n in range(60)]


class Reader(HTMLParser):
    """The elements, their attributes and the words of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def make_oracle(**changed: int) -> Oracle:
    counts = {
        "num_planned": 1000,
        "num_completed": 1000,
        "num_rejected": 0,
        "num_lost": 0,
        "num_doubled": 0,
        "num_wrong": 0,
        "num_token_rows": 1000,
        "num_output_tokens": 200_123,
        "num_made_tokens": 201_000,
        "num_made_again": 877,
    }
    return Oracle(
        **(counts | changed),
        made_again_by={"killed": 877},
        findings=[HOSTILE],
        audit={"completed": 1000, "findings": 0},
    )


def make_result(name: str = "short", faults: bool = True) -> Result:
    worker = Series("w0", "MB", TIMES_S, [100.0 + t / 60 for t in TIMES_S])
    killed = FaultSeen(30.0, "worker killed", "w0", 0.0, 48, 877, [1.5, 2.25], True)
    return Result(
        name=name,
        command="python -m benchmarks.campaign short.toml",
        machine="2 cores",
        commit="0123456789abcdef",
        began_at="2026-01-01T00:00:00+00:00",
        configuration={"workers": {"count": 2}, "seed": 7},
        facts={"prompts a second": 123.4},
        figures=[
            Figure("campaign.lost", 0, 0, "lower", "prompts"),
            Figure("campaign.cpu_ms_per_prompt", 2.5, 2.0, "lower", "ms"),
        ],
        series=[
            Series("prompts", "prompts", TIMES_S, [100.0 * t for t in TIMES_S]),
            Series("cpu.worker", "s", TIMES_S, [t / 2 for t in TIMES_S]),
            Series("cpu.redis", "s", TIMES_S, [t / 20 for t in TIMES_S]),
        ],
        processes=[ProcessSeen("w0", "worker", 77, 60.0, worker, 1.0)],
        stages=[Stage("worker", 60.0, 1.9, 102.0), Stage("redis", 6.0, 0.6, 20.0)],
        faults=[killed] if faults else [],
        left_out=[],
        recoveries=[Recovery("worker killed", 1, 2, 1.875, 2.25)] if faults else [],
        oracle=make_oracle(),
    )


@pytest.fixture(scope="module")
def read() -> Reader:
    """The page of a result with a hostile name, drawn once."""
    return Reader(page_of(make_result(HOSTILE)))


def test_the_page_shows_figures_goals_recoveries_and_the_oracle(read: Reader) -> None:
    words = " | ".join(read.words)

    assert "Every law held." in words
    assert "campaign.cpu_ms_per_prompt" in words and "≤ 2, missed" in words
    assert "worker killed" in words and "2.25" in words and "200,123" in words
    assert "Grows fastest over the last 80 % of its life: w0, 1 MB a minute." in words
    assert read.tags.count("svg") == 5  # prompts, memory, cores, stages, recoveries


def test_the_page_loads_and_runs_nothing_whatever_a_result_says(read: Reader) -> None:
    assert not {"script", "img", "link", "iframe", "object", "image"} & set(read.tags)
    assert any(value.startswith("default-src 'none'") for _, value in read.attributes)
    leads = [v for n, v in read.attributes if n in ("src", "href", "xlink:href", "data")]
    assert all(value.startswith("#") for value in leads)
    inside = [v for _, v in read.attributes for v in re.findall(r"url\(([^)]*)\)", v)]
    assert all(value.startswith("#") for value in inside)
    assert HOSTILE in " ".join(read.words)


def test_what_is_counted_so_far_is_shown_as_a_rate() -> None:
    counted = Series("prompts", "prompts", TIMES_S, [5.0 * t for t in TIMES_S])

    rate = rate_of(counted)

    assert rate.unit == "prompts/s"
    assert set(rate.value) == {5.0}
    assert TIMES_S[0] < rate.t_s[0] < TIMES_S[1]
    assert rate_of(Series("prompts", "prompts", [], [])).t_s == []


def test_the_page_says_which_laws_were_broken() -> None:
    result = make_result(faults=False)
    result.series.clear()
    result.broken_laws.append("3 prompts are lost")

    words = Reader(page_of(result)).words

    assert "3 prompts are lost" in words and "Every law held." not in words


def test_the_page_of_a_campaign_without_faults_or_samples_stands() -> None:
    result = make_result(faults=False)
    result.series.clear()
    result.processes.clear()
    result.stages.clear()

    read = Reader(page_of(result))

    assert "None were made." in read.words
    assert "svg" not in read.tags


def test_a_result_that_was_kept_becomes_a_page_beside_it(tmp_path: Path) -> None:
    kept = tmp_path / "short_cpu2_202601.json"
    kept.write_bytes(make_result(faults=False).as_json())

    page = write_page(Result.read(kept), kept.with_suffix(".html"))

    assert "Campaign short" in Reader(page.read_text(encoding="utf-8")).words
