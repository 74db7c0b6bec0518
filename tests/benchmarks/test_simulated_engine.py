"""The engine without a model: what it promises to whoever measures against it."""

from __future__ import annotations

import statistics
from pathlib import Path

import orjson
import pytest

from benchmarks.simulated_engine import Lengths, Pace, Request, Words
from tests.tiny_model import make_tiny_model


def test_lengths_have_the_mean_and_the_deviation_that_were_asked_for() -> None:
    lengths = Lengths(mean=1600.0, variation=1.0)

    drawn = [lengths.draw(seed) for seed in range(20_000)]

    assert statistics.fmean(drawn) == pytest.approx(1600, rel=0.03)
    assert statistics.stdev(drawn) == pytest.approx(1600, rel=0.10)
    assert lengths.draw(7) == lengths.draw(7)
    assert {Lengths(256.0, 0.0).draw(seed) for seed in range(5)} == {256}


def test_past_its_knee_a_step_takes_so_many_times_as_long() -> None:
    pace = Pace(base_s=0.002, per_request_s=0.00001, knee=256, collapse=4.0)

    assert pace.step_s(256) == pytest.approx(0.00456)
    assert pace.step_s(300) == pytest.approx(0.02)


def test_a_client_hears_of_the_first_token_and_then_at_its_interval() -> None:
    request = Request("r", num_ids=200, stream_every=64)

    heard_at = []
    for _ in range(200):
        request.gain(1.0)
        if request.heard.is_set():
            heard_at.append(request.num_done)
            request.heard.clear()

    assert heard_at == [1, 65, 129, 193, 200]


def test_an_answer_is_as_many_letters_as_ids_and_ends_in_the_stop_id(tmp_path: Path) -> None:
    words = Words(make_tiny_model(tmp_path / "model"))
    meta = {"prompt_tokens": 3, "finish_reason": None}

    body = words.body("r", 5, 2, meta)

    reply = orjson.loads(body)
    assert len(reply["text"]) == 4
    assert len(reply["output_ids"]) == 5
    assert reply["output_ids"][-1] == 2
    assert reply["meta_info"]["completion_tokens"] == 5
