"""Whether engines that were measured are as fast simulated, in the schedule's own time."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibration import write_drafter
from benchmarks.simulated.pace import Drafter, Pace
from benchmarks.simulated.presets import DRAFTERS, PRESETS
from benchmarks.simulated.schedule import Job, Schedule

NUM_WAVES = 2
SENDING_S = 2e-4  # a client's, per request

# Output tokens per second by requests at once, 128 prompt tokens and 256 new ones: SmolLM2-135M on
# one H200, without a drafter and with a random one of two layers.
PLAIN = {1: 447.0, 48: 17_720.0, 128: 38_126.0, 256: 56_052.0, 512: 16_099.0}
DRAFTED = {1: 208.0, 48: 7_844.0}


def tokens_per_s(pace: Pace, max_running: int, num_at_once: int) -> float:
    """Of a client that keeps so many in it and asks the next as soon as one is over."""
    schedule = Schedule(pace, max_running)
    num_jobs = num_at_once * NUM_WAVES
    asked_s = deque(number * SENDING_S for number in range(num_at_once))  # ascending
    num_over = 0

    def hear() -> None:
        nonlocal num_over
        num_over += 1
        if num_over <= num_jobs - num_at_once:
            asked_s.append(max(schedule.at_s, asked_s[-1] if asked_s else 0.0) + SENDING_S)

    while num_over < num_jobs:
        if asked_s and asked_s[0] < schedule.due_s():
            schedule.add(Job(128, 256, "length", hear=hear), asked_s.popleft())
        else:
            schedule.advance(schedule.due_s())
    return num_jobs * 256 / schedule.at_s


@pytest.mark.parametrize("num_at_once", PLAIN)
def test_the_preset_has_the_pace_of_the_engine_that_was_measured(num_at_once: int) -> None:
    preset = PRESETS["h200_smollm2"]

    found = tokens_per_s(preset.pace, preset.max_running, num_at_once)

    assert found == pytest.approx(PLAIN[num_at_once], rel=0.1)


@pytest.mark.parametrize("num_at_once", DRAFTED)
def test_the_drafter_has_the_pace_of_the_one_that_was_measured(num_at_once: int) -> None:
    preset = PRESETS["h200_smollm2"]
    pace = replace(preset.pace, drafter=DRAFTERS["h200_smollm2_random"])

    found = tokens_per_s(pace, preset.max_running, num_at_once)

    assert found == pytest.approx(DRAFTED[num_at_once], rel=0.1)


def test_the_folder_that_is_written_of_a_drafter_is_read_as_that_drafter(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")

    assert Drafter.read(folder) == DRAFTERS["h200_smollm2_random"]
