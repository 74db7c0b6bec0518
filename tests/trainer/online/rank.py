"""One rank of a training run, in a process of its own: what test_ranks.py has forked.

Trains on random samples and writes what each step saw to metrics.jsonl, as any run does. Of the
changes, `stop_at=N` sends SIGTERM to the process itself after step N, `die_at=N` kills it without a
word, `silence_s=N` is how long a rank may be silent; the others are the recipe's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from dflash_workers.contract.errors import Draining, FleetError
from trainer.online import liveness
from trainer.online.recipe import TrainJob
from trainer.online.topology import read_launch
from trainer.online.train import train_on
from trainer.online.watching import StepRecord
from trainer.recipes import named_recipe
from trainer.tokens.shards import Sample

NUM_SAMPLES = 23  # by 4 a microbatch: the last one of an epoch is shorter


def random_samples(num: int, *, heldout: bool = False) -> list[Sample]:
    random = np.random.default_rng([5, heldout])
    samples = []
    for i in range(num):
        prompt_len = int(random.integers(3, 12))
        ids = random.integers(3, 500, prompt_len + int(random.integers(6, 21))).astype(np.int32)
        key = f"{heldout:d}{i:031x}"
        samples.append(Sample(key, f"s{i}", 0, ids, prompt_len, -1, heldout, "length", []))
    return samples


def run(environ: dict[str, str], log: str, model_dir: str, out: str, changes: list[str]) -> None:
    """A process's whole life; exits 1 after an error of ours."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environ
    torch.set_num_threads(1)
    ours = ("stop_at=", "die_at=", "silence_s=")
    acts = dict(c.split("=") for c in changes if c.startswith(ours))
    settings = [c for c in changes if not c.startswith(ours)]
    liveness.SILENCE_S = float(acts.get("silence_s", liveness.SILENCE_S))
    job = TrainJob(
        named_recipe("smollm2_cpu", settings), model_dir, Path(out), launch=read_launch(os.environ)
    )

    def act(record: StepRecord) -> None:
        if str(record.step) == acts.get("stop_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        if str(record.step) == acts.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train_on(
            random_samples(NUM_SAMPLES),
            job=job,
            provenance={},
            on_step=act,
            heldout=random_samples(3, heldout=True),
        )
    except Draining as error:
        print(error, file=sys.stderr)
    except FleetError as error:
        print(f"dflash-fleet: {error}", file=sys.stderr)
        sys.exit(1)
