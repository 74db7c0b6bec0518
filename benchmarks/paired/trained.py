"""One rank of a real training, on answers that were given or made up, and what befalls it.

Run by processes.py in each rank: the product's own `train_on`, with its checkpoints. The other side
is `watch_a_death`: it kills a rank without a word, sees how the others end, and that the same
command goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import torch

from benchmarks.paired.processes import Processes, started
from benchmarks.short_training import Answers
from dflash_workers.contract.errors import Draining, FleetError
from trainer.online.checkpoint import latest_checkpoint, read_state
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.topology import read_launch
from trainer.online.train import train_on
from trainer.online.watching import METRICS, StepRecord
from trainer.tokens.shards import Sample

ENDS_S = 60.0  # for ranks that should be gone in 30
NUM_BEFORE, NUM_AFTER = 8, 6  # steps; checkpoints are written every fifth
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """What every rank does."""

    recipe: TrainRecipe
    model_dir: Path
    answers: Path  # as benchmarks.short_training writes them
    out: Path
    stop_at: int = 0  # step after which it is asked to leave; 0: at its end


@dataclass(frozen=True, slots=True)
class Death:
    """What came of it."""

    ended_s: float  # from the death to the end of the last of the others
    resumed_at: int  # step


def train(training: Training) -> None:
    """A rank's life; exits with 1 after an error of ours."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # threads that spin would wait for each other on shared cores
    launch = read_launch(os.environ)

    def act(record: StepRecord) -> None:
        if record.step == training.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_on(
            samples_of(training.answers),
            job=TrainJob(training.recipe, str(training.model_dir), training.out, launch=launch),
            provenance={"program": "paired"},
            on_step=act,
        )
    except Draining as error:
        print(error, file=sys.stderr)
    except FleetError as error:
        print(f"dflash-fleet: {error}", file=sys.stderr)
        sys.exit(1)


def watch_a_death(training: Training, num_ranks: int, folder: Path, timeout_s: float) -> Death:
    """Raises RuntimeError where the others don't end as they should, or nothing goes on in time."""
    until = time.monotonic() + timeout_s
    with started(num_ranks, folder, train, training) as ranks:
        _await_steps(training.out, ranks, until)
        ranks.kill(0)
        died = time.monotonic()
        codes = ranks.wait(ENDS_S)
        ended_s = time.monotonic() - died
        said = ranks.log()
    if codes[1:] != [1] * (num_ranks - 1) or "goes on from the last checkpoint" not in said:
        raise RuntimeError(f"a rank died, the others ended with {codes[1:]}:\n{said}")
    resumed_at = _checkpoint(training.out)
    stop_at = resumed_at + NUM_AFTER
    again = Training(training.recipe, training.model_dir, training.answers, training.out, stop_at)
    with started(num_ranks, folder, train, again) as ranks:
        codes, said = ranks.wait(until - time.monotonic()), ranks.log()
    steps = [record["step"] for record in records(training.out)]
    if any(codes) or steps != list(range(1, len(steps) + 1)) or len(steps) < stop_at:
        raise RuntimeError(f"it did not go on: {codes}, steps {steps}:\n{said}")
    return Death(ended_s, resumed_at)


def samples_of(answers: Path) -> list[Sample]:
    """What is trained on."""
    found = Answers(**orjson.loads(answers.read_bytes()))
    pairs = enumerate(zip(found.prompts, found.replies, strict=True))
    return [
        Sample(f"{i:032x}", str(i), 0, np.array(p + r, np.int32), len(p), -1, False, "length", [])
        for i, (p, r) in pairs
        if len(r) > 1
    ]


def records(out: Path) -> list[dict[str, float]]:
    """A line per step."""
    path = out / METRICS
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def write_made_up_answers(path: Path, vocab_size: int, count: int = 64) -> Path:
    """Where nobody gave any."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, vocab_size - 1, 48).tolist() for _ in range(count)]
    answers = {"prompts": [t[:16] for t in texts], "replies": [t[16:] for t in texts]}
    path.write_bytes(orjson.dumps(answers))
    return path


def _await_steps(out: Path, ranks: Processes, until: float) -> None:
    while len(records(out)) < NUM_BEFORE:
        if not ranks.are_alive() or time.monotonic() > until:
            raise RuntimeError(f"no {NUM_BEFORE} steps came:\n{ranks.log()}")
        time.sleep(POLL_S)


def _checkpoint(out: Path) -> int:
    """Step of the newest one."""
    found = latest_checkpoint(out)
    if found is None:
        raise RuntimeError(f"{out}: no checkpoint to go on from")
    return read_state(found).step
