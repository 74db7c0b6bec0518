"""What is said of a drafter in a server, from replies that are written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.h200.headline.curves import draw_curves, draw_scaling, read_curve
from benchmarks.h200.headline.findings import figures_of
from benchmarks.h200.headline.measure import (
    Heldout,
    Measured,
    Speeds,
    macro_accept_length,
    timed_requests,
)
from benchmarks.served import Replies

LOOP = [7, 8] * 60
LONG = list(range(100, 121))
HELDOUT = Heldout([[1], [2], [3], [4]], ["maths", "maths", "code", "code"], [0], 128)
PLAIN = Replies([LONG, LONG[:11], LONG, LOOP], [0] * 4, 1.0)
DRAFTED = Replies([LONG, LONG[:11], [*LONG[:-1], 9], LOOP], [10, 10, 5, 1], 1.0)


def test_each_domain_counts_once_and_loops_do_not_count() -> None:
    overall, by_domain = macro_accept_length(HELDOUT.domains, DRAFTED)

    assert by_domain == {"maths": (20 / 10 + 10 / 10) / 2, "code": 20 / 5}
    assert overall == pytest.approx((1.5 + 4) / 2)


def test_speed_is_measured_on_replies_as_long_as_the_plain_ones() -> None:
    requests = timed_requests(HELDOUT, PLAIN, 9)

    lengths = [(prompt, sampling["max_new_tokens"]) for prompt, sampling in requests]
    assert lengths == [([1], 21), ([3], 21)]  # neither the short one nor the loop
    assert all(s["ignore_eos"] and s["temperature"] == 0 for _, s in requests)


def test_figures_say_what_a_step_must_bring_to_be_worth_it() -> None:
    speeds = {"1": Speeds(100, [2.0, 9.0, 2.0], [1.0, 1.0, 5.0])}

    found = figures_of(HELDOUT, Measured(PLAIN, DRAFTED, DRAFTED, speeds))

    values = {figure.figure.removeprefix("headline."): figure.value for figure in found}
    assert values["speedup_1"] == 2.0
    assert values["plain_1"] == 50.0
    assert values["drafted_1"] == 100.0
    assert values["break_even_1"] == pytest.approx(2.75 / 2)
    assert values["loop_share"] == 0.25
    assert values["equal_share"] == 0.75
    assert values["accept_length.code"] == 4.0


def test_curves_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": step, "measured_accept_length": 1.5 if step % 2 else None})
        for step in range(4)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))

    curve = read_curve(tmp_path / "metrics.jsonl")
    draw_curves({"three": curve}, tmp_path / "curves.png")
    draw_scaling({5000: curve, 10000: curve}, tmp_path / "data.png")

    assert curve.steps == [1, 3]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert (tmp_path / "data.png").stat().st_size > 1000
