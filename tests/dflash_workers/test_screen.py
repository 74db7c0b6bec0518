"""What a person reads off the status screen."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from dflash_workers.screen import screen_of

STATUS: dict[str, Any] = {
    "run": "maths",
    "state": "active",
    "sealed": False,
    "total": 1000,
    "completed": 240,
    "failed": 10,
    "rate_per_sec": 5.6,
    "eta_hours": 3.5,
    "total_input_tokens": 40_000,
    "total_output_tokens": 1_234_567,
    "avg_output_tokens": 5144.0,
    "elapsed_hours": 1.25,
    "s3_uploaded": 8,
    "s3_bytes": 1,
    "status": "running",
    "num_noted": 12,
    "queue": "generate.x",
    "num_queued": 7,
    "num_pending": 8,
    "num_inflight": 2,
    "workers": [
        {"slot": "gpu-0", "state": "up", "in_flight": 48.0, "kv_use": 0.5, "accept_length": 3.2},
        {"slot": "gpu-1", "state": "paused: engine: it is gone", "in_flight": 0.0},
    ],
    "tokenizer_up": True,
    "eta_low_hours": 3.0,
    "eta_high_hours": 4.25,
    "mean_rate_per_sec": 4.4,
    "rejections": {"poison": 7, "context_length": 3},
    "made_again_tokens": 55,
    "gpu_hours": 8.5,
    "cost_usd": {"h200": 27.2},
    "num_untokenized": 2,
    "num_quarantined": 1,
    "trainers": [
        {"name": "first", "num_behind": 1, "step": 0, "num_steps": 0, "is_finished": False},
        {"name": "next", "num_behind": 3, "step": 50, "num_steps": 2000, "is_finished": False},
        {"name": "over", "num_behind": 0, "step": 70, "num_steps": 70, "is_finished": True},
    ],
    "errors": [{"at": 0.0, "what": "rejected 'q1': poison: it\nkills \x1b[31mengines"}],
}


def shown(**changes: Any) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(screen_of(STATUS | changes))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    "words",
    [
        "240 completed, 10 rejected of 1,000",
        "25.0%",
        "5.60 prompts/s now, 4.40 over the run",
        "3.5 h (3.0 h to 4.2 h), 75 min so far",
        "8.50 GPU-hours at work, 27.20 USD as h200",
        "1,234,567 out, 40,000 in, 5,144 out a prompt, 55 made again",
        "7 poison, 3 context_length",
        "7 hints, 8 batches wait, 2 held, 12 prompts of these noted",
        "5 made, 2 commits behind, 1 in quarantine",
        "first: 1 shards behind, next: 3 shards behind, step 50 of 2,000 kept",
        "over: finished, step 70 of 70",
        "paused: engine: it is gone",
        "50%",
        "3.20",
    ],
)
def test_everything_that_matters_is_on_it(words: str) -> None:
    assert words in shown()


def test_a_slow_pace_of_nothing_leaves_the_end_open() -> None:
    assert "3.5 h (3.0 h to open)" in shown(eta_high_hours=None)
    assert "no end in sight" in shown(eta_hours=None)
    assert "done, 75 min from the first claim on" in shown(status="done")


def test_text_of_prompts_can_neither_colour_nor_break_the_screen() -> None:
    text = shown()

    assert "\x1b" not in text
    assert "it\N{REPLACEMENT CHARACTER}kills" in text


def test_a_hundred_workers_fit_on_it() -> None:
    text = shown(workers=[{"slot": f"w{n}", "state": "up"} for n in range(100)])

    assert "60 more" in text
    assert len(text.splitlines()) < 65


def test_it_is_drawn_in_no_time() -> None:
    began = time.process_time()

    shown()

    assert time.process_time() - began < 1
