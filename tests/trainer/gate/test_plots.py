"""Plots: what is drawn has the proportions of what was counted, and all of it is in sight."""

from __future__ import annotations

import pytest

from tests.trainer.gate.pages import parsed
from trainer.gate.plots import bars, histogram

BINS = {"0": 0, "1": 3, "2-3": 12, "4-7": 6}


def rectangles(figure: str) -> list[dict[str, float]]:
    seen = parsed(figure).seen
    return [{k: float(v or 0) for k, v in attrs.items()} for tag, attrs in seen if tag == "rect"]


def view(figure: str) -> tuple[float, float]:
    (box,) = (attrs["viewbox"] for tag, attrs in parsed(figure).seen if tag == "svg")
    _left, _top, width, height = map(float, (box or "").split())
    return width, height


def test_the_bars_of_a_histogram_are_as_high_as_their_counts() -> None:
    heights = [r["height"] for r in rectangles(histogram("Lengths", BINS))]

    assert heights == [pytest.approx(n * heights[2] / 12, abs=0.1) for n in BINS.values()]


def test_the_bars_of_categories_are_as_wide_as_their_counts_and_the_largest_comes_first() -> None:
    widths = [r["width"] for r in rectangles(bars("Reasons", {"a": 5, "b": 20, "c": 10}))]

    assert widths == [pytest.approx(n * widths[0] / 20, abs=0.1) for n in (20, 10, 5)]


def test_many_categories_are_cut_short_and_none_is_lost() -> None:
    text = parsed(bars("Sources", {f"f{n}": n for n in range(1, 31)}, most=10)).text

    assert f"20 others: {sum(range(1, 21))}" in text
    assert "f30: 30" in text


@pytest.mark.parametrize("figure", [histogram("Lengths", BINS), bars("Lengths", BINS)])
def test_every_bar_lies_inside_the_picture(figure: str) -> None:
    width, height = view(figure)

    for bar in rectangles(figure):
        assert 0 <= bar["x"] <= bar["x"] + bar["width"] <= width
        assert 0 <= bar["y"] <= bar["y"] + bar["height"] <= height


@pytest.mark.parametrize("figure", [histogram("Lengths", {}), bars("Lengths", {"a": 0})])
def test_nothing_counted_is_said_in_words(figure: str) -> None:
    assert "nothing to count" in figure
    assert "<svg" not in figure
