r"""A drafter from a server's own answers, in a few minutes: for programs that need a trained one.

    python -m benchmarks.short_training answer --url SERVER --model M --out answers.json
    python -m benchmarks.short_training train --model M --answers answers.json --out FOLDER

`answer` asks a server for answers to the example prompts with other numbers in them, sampled, many
at once; `train` is the real training on them and the real export, into FOLDER/export. Safe to call
again: training goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from benchmarks.asking import ask
from benchmarks.varied_prompts import varied_prompts
from dflash_workers.contract.chat import load_tokenizer
from trainer.drafter.export import export_drafter
from trainer.online.checkpoint import read_drafter
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.train import train_on
from trainer.online.watching import StepRecord
from trainer.recipes import named_recipe
from trainer.tokens.shards import Sample

ASKED_AT_ONCE = 128
TEMPERATURE = 0.8
SAID_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class Answers:
    """Prompts and what the target said."""

    prompts: list[list[int]]
    replies: list[list[int]]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.stage == "answer":
        answers = answer(options.url, options.model, options.count, options.max_new_tokens)
        options.out.write_bytes(orjson.dumps(asdict(answers)))
        num_tokens = sum(map(len, answers.replies))
        print(f"{len(answers.replies)} answers, {num_tokens} tokens")
    else:
        answers = Answers(**orjson.loads(options.answers.read_bytes()))
        recipe = named_recipe(options.recipe, options.changes)
        print(train_and_export(options.model, answers, recipe, options.out, options.engine))
    return 0


def answer(url: str, model_dir: str, count: int, max_new_tokens: int) -> Answers:
    """What the target behind a server says to prompts that may be trained on."""
    end = load_tokenizer(model_dir).eos_token_id
    sampling = {
        "temperature": TEMPERATURE,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": [end],
    }
    prompts = varied_prompts(model_dir, count, heldout=False)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as askers:
        replies = askers.map(partial(ask, url, sampling=sampling), prompts)
        return Answers(prompts, [reply["output_ids"] for reply in replies])


def train_and_export(
    model_dir: str, answers: Answers, recipe: TrainRecipe, out: Path, engine: str
) -> str:
    """Trains, writes `out`/export, and says in a line how it went."""
    done = train_on(
        _samples(answers),
        job=TrainJob(recipe, model_dir, out / "training"),
        provenance={"program": "short_training"},
        on_step=_say,
    )
    assert done is not None, "a process by itself leads"
    drafter = read_drafter(Path(done.checkpoint_dir))
    export_drafter(drafter, out / "export", engine=engine, provenance={})
    return (
        f"{len(answers.replies)} answers, {done.num_steps} steps in {done.seconds:.0f} s, loss "
        f"{done.first_loss:.2f} to {done.last_loss:.2f}"
    )


def _samples(answers: Answers) -> list[Sample]:
    pairs = enumerate(zip(answers.prompts, answers.replies, strict=True))
    return [
        Sample(str(i), str(i), 0, np.array(p + r, np.int32), len(p), -1, False, "length", [])
        for i, (p, r) in pairs
        if len(r) > 1
    ]


def _say(record: StepRecord) -> None:
    if record.step % SAID_EVERY == 0:
        print(f"step {record.step}: loss {record.loss:.3f}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    asking = stages.add_parser("answer", help="have a server answer")
    asking.add_argument("--url", required=True)
    asking.add_argument("--count", type=int, default=6000)
    asking.add_argument("--max-new-tokens", type=int, default=128)
    training = stages.add_parser("train", help="train and export")
    training.add_argument("--answers", type=Path, required=True)
    training.add_argument("--recipe", default="smollm2_h200")
    training.add_argument("--set", dest="changes", action="append", default=[], help="key=value")
    training.add_argument("--for", dest="engine", default="sglang==0.5.17")
    for stage in (asking, training):
        stage.add_argument("--model", required=True)
        stage.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
