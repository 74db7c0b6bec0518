"""SGLang itself, on the CPU, killed in the middle of a batch and started again on its port."""

from __future__ import annotations

import dataclasses
import os
import signal
import uuid
from pathlib import Path

import pytest

from dflash_workers.embedded import S3Login, free_ports
from dflash_workers.notes import Ended, unpack
from dflash_workers.server import EngineConfig, start_engine, wait_until_ready
from producer.fingerprint import RunOptions, make_spec
from tests.conftest import BUCKET
from tests.faults.fleet import Fleet, Place
from tests.faults.processes import until
from tests.faults.runs import FaultRun
from tests.planned import prompt

READY_S = 400.0
QUESTIONS = ["What is the capital of France?", "Count to five.", "Name a colour."]


@pytest.mark.slow
def test_sglang_killed_within_a_batch_comes_back_and_no_finished_turn_is_asked_again(
    tmp_path: Path, engine_python: Path, smollm2_dir: Path, s3_login: S3Login
) -> None:
    port = free_ports(1)[0]
    config = EngineConfig(engine_python, smollm2_dir, port, cpu=True, max_total_tokens=4096)
    place = Place(tmp_path, smollm2_dir, s3_login, BUCKET)
    options = RunOptions(max_new_tokens=16)
    spec = make_spec(f"run-{uuid.uuid4().hex[:8]}", str(smollm2_dir), options, None)
    log = tmp_path / "sglang.log"
    with Fleet(place, f"faults-{uuid.uuid4().hex[:8]}") as fleet:
        run = FaultRun(fleet, spec)
        settings = fleet.settings(run.name)
        settings = dataclasses.replace(settings, engine_url=config.url, max_in_flight=2)
        with start_engine(config, log) as engine:
            wait_until_ready(engine, config.url, READY_S)
            fleet.worker("w1", settings)
            (message,) = run.add([prompt(text, "And why?") for text in QUESTIONS])
            until(lambda: run.num_noted(message) >= 2, 300, "two turns")
            os.kill(engine.pid, signal.SIGKILL)
            noted = run.notes(message)
        with start_engine(config, log) as engine:
            wait_until_ready(engine, config.url, READY_S)
            run.wait(message, timeout_s=300)

        answers = {
            f"{row.key}:{answer.turn}": answer
            for row in run.rows(message)
            for answer in row.answers
        }

    assert len(answers) == 2 * len(QUESTIONS)
    assert len(noted) >= 2
    for field, row in noted.items():
        note = unpack(row)
        if isinstance(note, Ended):  # measured anew, a turn would have another latency
            assert answers[field].latency_s == note.answer.latency_s
            assert answers[field].output_ids == note.answer.output_ids
