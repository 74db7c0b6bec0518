r"""Drafters of several kinds from one bundle: headline.sh's second stage.

    python -m benchmarks.h200.headline.training --model M --bundle RUN.tar.zst --out FOLDER \
        --variant three [--recipe smollm2_h200] [--steps 2000] [--set key=value]

The product's own training and export, on the bundle's samples, into FOLDER/<variant>: `training`
(checkpoints, metrics.jsonl) and `export`. A variant is a recipe with changes and, where it shows
what data are worth, a number of samples: the first ones of one shuffle, so that more data hold the
fewer. Safe to call again: training goes on where it was stopped; SIGTERM exports what there is.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.h200.headline.bundle import read_run
from benchmarks.h200.headline.generate import RUN
from dflash_workers.contract.errors import Draining
from dflash_workers.contract.provenance import MADE_WITH, made_with
from dflash_workers.contract.records import RunSpec
from trainer.drafter.export import export_drafter
from trainer.online.checkpoint import latest_checkpoint, read_drafter, read_state
from trainer.online.fingerprint import check_target
from trainer.online.recipe import TrainJob
from trainer.online.train import train_on
from trainer.online.watching import StepRecord
from trainer.recipes import named_recipe
from trainer.tokens.shards import Sample

TRAINING, EXPORT = "training", "export"
SAID_EVERY = 100  # steps
MIN_ANSWER = 2  # tokens


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter to try."""

    changes: tuple[str, ...] = ()
    num_samples: int = 0  # to train on; 0: all


THREE = "drafter.num_layers=3"
VARIANTS = {
    "one": Variant(("drafter.num_layers=1",)),
    "two": Variant(("drafter.num_layers=2",)),
    "three": Variant((THREE,)),
    "five": Variant(("drafter.num_layers=5",)),
    "dpace": Variant((THREE, "loss.weights=dpace")),
    "markov": Variant((THREE, "drafter.markov_rank=128")),
    "random": Variant((THREE, "drafter.copy_target_layers=false")),
    "late_features": Variant((THREE, "drafter.target_layer_ids=[12,18,22,25,28]")),
    "many_anchors": Variant((THREE, "data.num_anchors=256")),
    "faster": Variant((THREE, "optimizer.learning_rate=2e-3")),
    "short_blocks": Variant((THREE, "drafter.block_size=5", "loss.gamma=2.5")),
    "data_5000": Variant((THREE,), 5000),
    "data_10000": Variant((THREE,), 10000),
    "data_20000": Variant((THREE,), 20000),
    "data_40000": Variant((THREE,), 40000),
}


def main(arguments: list[str]) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    out = args.out / args.variant
    if (out / EXPORT).exists():
        return 0
    variant = VARIANTS[args.variant]
    changes = [*variant.changes, *args.changes]
    if args.steps:
        changes.append(f"num_steps={args.steps}")
    recipe = named_recipe(args.recipe, changes)
    spec, samples = read_run(args.bundle, RUN)
    check_target(spec, args.model)
    train, heldout = divide(samples, variant.num_samples)
    job = TrainJob(recipe, args.model, out / TRAINING)
    print(f"{args.variant}: {len(train)} samples, {len(heldout)} held out", flush=True)
    print(train_and_export(job, train, heldout, spec, args.engine))
    return 0


def divide(samples: Sequence[Sample], num_samples: int) -> tuple[list[Sample], list[Sample]]:
    """Those to train on, so many or all, and those held out; either in the order of one shuffle."""
    order = [s for s in samples if len(s.ids) - s.prompt_len >= MIN_ANSWER]
    random.Random(0).shuffle(order)
    train = [s for s in order if not s.heldout]
    return train[: num_samples or len(train)], [s for s in order if s.heldout]


def train_and_export(
    job: TrainJob, train: list[Sample], heldout: list[Sample], spec: RunSpec, engine: str
) -> str:
    """Train, or go on; export beside the training's folder; say in a line how it went."""
    facts = {"run": spec.run, MADE_WITH: made_with(spec)}
    try:
        train_on(train, job=job, provenance=facts, on_step=say, heldout=heldout)
    except Draining as error:
        print(error)
    newest = latest_checkpoint(job.out)
    assert newest is not None, "training ends with a checkpoint"
    state = read_state(newest)
    provenance = {**state.provenance, "step": state.step, "recipe": state.recipe}
    export_drafter(
        read_drafter(newest), job.out.parent / EXPORT, engine=engine, provenance=provenance
    )
    return f"{state.step} steps, loss {state.first_loss:.2f} to {state.last_loss:.2f}"


def say(record: StepRecord) -> None:
    """Now and then, and at each look at held-out answers."""
    measured = record.measured_accept_length
    if measured is not None or record.step % SAID_EVERY == 0:
        seen = "" if measured is None else f", held out {measured:.3f}"
        print(f"step {record.step}: loss {record.loss:.3f}{seen}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("bundle", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--recipe", default="smollm2_h200")
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="key=value")
    parser.add_argument("--for", dest="engine", default="sglang==0.5.17")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
