"""What is shown of a run."""

from __future__ import annotations

import importlib.util
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput
from trainer.online.watching import Board, Gauges, Lines, StepRecord, starving_side

PHASES = {"data": 0.1, "target": 1.0, "transfer": 0.0, "drafter": 2.0, "optimizer": 0.1}


def record(step: int, starved_s: float = 0.0) -> StepRecord:
    return StepRecord(
        at=time.time(),
        step=step,
        num_steps=9,
        loss=2.5,
        accept_length=1.4,
        measured_accept_length=None,
        accuracy_by_place=[0.5, 0.25],
        entropy=1.0,
        gradient_norm=0.7,
        learning_rate=1e-3,
        num_tokens=100,
        tokens_per_s=50.0,
        mfu=None,
        seconds=PHASES,
        starved_s=starved_s,
        starving="",
    )


def test_prometheus_reads_the_last_step_and_the_totals() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gauges = Gauges(port)

    gauges.see(record(1, starved_s=3.0))
    gauges.see(record(2, starved_s=4.5))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    with pytest.raises(BadInput, match=str(port)):
        Gauges(port)
    gauges.close()

    assert "dflash_trainer_step 2.0" in lines
    assert "dflash_trainer_loss 2.5" in lines
    assert "dflash_trainer_tokens_total 200.0" in lines
    assert "dflash_trainer_starved_seconds_total 4.5" in lines
    assert 'dflash_trainer_phase_seconds{phase="drafter"} 2.0' in lines
    assert 'dflash_trainer_draft_accuracy{place="2"} 0.25' in lines


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    assert importlib.util.find_spec("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path, 0)
    board.see(record(1))
    board.see(record(2))
    board.close()

    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"loss", "accept_length", "accuracy/2", "seconds/target"} <= set(
        events.Tags()["scalars"]
    )
    assert [e.step for e in events.Scalars("loss")] == [1, 2]


def test_lines_of_steps_that_were_undone_are_dropped(tmp_path: Path) -> None:
    first = Lines(tmp_path, 0)
    for step in (1, 2, 3):
        first.see(record(step))
    first.close()

    second = Lines(tmp_path, 2)
    second.see(record(3))
    second.close()

    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("changes", "sender_wait_s", "side"),
    [
        ({}, 0.0, ""),
        ({"data": 1.0}, 0.0, "data"),
        ({"transfer": 1.0}, 0.5, "drafter"),
        ({"transfer": 0.1}, 1.5, "target"),
    ],
)
def test_the_side_that_starves_is_the_one_that_waits(
    changes: dict[str, float], sender_wait_s: float, side: str
) -> None:
    assert starving_side(PHASES | changes, sender_wait_s) == side
