r"""Prompts become a run's token shards, by way of the whole fleet: headline.sh's first stage.

    python -m benchmarks.h200.headline.generate --model M --prompts PROMPTS --work WORK --out OUT \
        --engine-url URL [--samples 3] [--in-flight 256] [--seconds 400]

Redis and S3 (those that DFLASH_REDIS_URL and DFLASH_S3_ENDPOINT name, else embedded ones in
WORK/services), a plan made by the producer, `dflash-fleet worker` against the engine, then
`tokenize`, `gate`, `audit` and `report`, and WORK/run.tar.zst (bundle.py), from which everything
after this works. Safe to call again: committed batches are found, in WORK/services or in the
bundle, and what --seconds cut off is made by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.fleet_run import ROOT, at_engine, running_worker
from benchmarks.h200.headline.bundle import restore_bundle, save_bundle
from benchmarks.machine import describe_cpu
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.embedded import embedded_services
from dflash_workers.launcher import Child
from producer.api import EnqueueOptions, Run, RunOptions
from producer.ledger import Progress

RUN = "headline"
BUNDLE = "run.tar.zst"
LOOK_S = 2.0
# Answers to sets with few prompts are worth more: as many times the samples of the others.
WEIGHTS = {"gsm8k": 4.0, "humaneval": 4.0, "self_instruct": 4.0, "vicuna": 4.0}
DONE_CODES = (0, 3)  # 3: done, and something was found, which stands in the output


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall be generated, and how."""

    model_dir: str
    prompts: Path  # as prompt_sets.py writes them
    work: Path
    out: Path  # results and logs
    engine_url: str
    num_samples: int  # answers to a prompt
    in_flight: int
    seconds: float  # at most, of generation
    options: RunOptions


def main(arguments: list[str]) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    template = args.chat_template and args.chat_template.read_text(encoding="utf-8")
    options = RunOptions(
        chat_template=template or None,
        max_new_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=1.0,  # SGLang's PyTorch sampling sorts the vocabulary for it: two thirds of the speed
        top_k=-1,
    )
    wish = Wish(
        args.model,
        args.prompts,
        args.work,
        args.out,
        args.engine_url,
        args.samples,
        args.in_flight,
        args.seconds,
        options,
    )
    for folder in (wish.work, wish.out):
        folder.mkdir(parents=True, exist_ok=True)
    with opened(wish.work, wish.model_dir, RUN) as settings:
        if (wish.work / BUNDLE).exists():
            restore_bundle(open_store(settings), wish.work / BUNDLE)
        figures = generate(wish, settings)
        finish(wish, settings)
    print_figures(figures)
    found = circumstances(args.machine or describe_cpu(), ("celery", "redis", "orjson"))
    write_figures(wish.out, "headline_generation", "Generation", figures, found)
    return 0


@contextmanager
def opened(work: Path, model_dir: str, run: str) -> Iterator[Settings]:
    """Settings of a run, with services that are up."""
    settings = load_settings({"model": model_dir, "run": run})
    environ = os.environ
    with embedded_services(
        work / "services",
        settings,
        external_redis="DFLASH_REDIS_URL" in environ,
        external_s3="DFLASH_S3_ENDPOINT" in environ,
    ) as settings:
        yield settings


def generate(wish: Wish, settings: Settings) -> list[Figure]:
    """Plan what isn't planned, and have it answered until all is or time is over."""
    settings = at_engine(settings, wish.engine_url, RUN, wish.in_flight)
    with Run.create(settings, wish.model_dir, wish.options) as run:
        if not run.progress().sealed:
            plan(run, wish.prompts, wish.num_samples)
        before, began = run.progress(), time.monotonic()
        if before.num_batches_done < before.num_batches:
            with running_worker(settings, wish.out / "worker.log") as worker:
                wait_until_answered(run, worker, wish.seconds)
        seconds = time.monotonic() - began
        return figures_of(before, run.progress(), seconds)


def plan(run: Run, prompts: Path, num_samples: int) -> None:
    """Held-out prompts once each, the others as often as their weights say, shuffled, so that a
    part of the run is like the whole.
    """
    heldout = sorted((prompts / "heldout").glob("*.jsonl"))
    train = sorted((prompts / "train").glob("*.jsonl"))
    weights = {str(path): WEIGHTS[path.stem] for path in train if path.stem in WEIGHTS}
    run.enqueue(heldout, EnqueueOptions(heldout=0, shuffle=0))
    more = EnqueueOptions(samples=num_samples, weights=weights, heldout=0, shuffle=0)
    report = run.enqueue(train, more)
    print(f"{report.num_planned} prompts planned beside those held out; refused: {report.refused}")
    run.seal()


def wait_until_answered(run: Run, worker: Child, seconds: float) -> None:
    """Raises RuntimeError where the worker ends before the work does."""
    reconciler, deadline = run.reconciler(), time.monotonic() + seconds
    while True:
        reconciler.ledger.refresh()
        progress = reconciler.ledger.progress()
        print(f"{progress.num_prompts_done} of {progress.num_prompts} prompts", flush=True)
        if not reconciler.ledger.open or time.monotonic() > deadline:
            return
        if worker.poll() is not None:
            raise RuntimeError(f"the worker ended:\n{worker.tail()}")
        reconciler.look()
        time.sleep(LOOK_S)


def finish(wish: Wish, settings: Settings) -> None:
    """Shards of what is committed, what is to be said of them, and the bundle."""
    num_workers = str(min(8, os.cpu_count() or 1))
    verbs = (
        ("tokenize", "--workers", num_workers, "--json"),
        ("gate", "--html", str(wish.out / "gate.html"), "--json"),
        ("audit", "--json"),
        ("report", "--html", str(wish.out / "report.html"), "--no-gate", "--json"),
    )
    environ = os.environ | settings.environment()
    for verb, *flags in verbs:
        command = [sys.executable, "-m", "fleet", verb, *flags]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        (wish.out / f"{verb}.json").write_text(done.stdout, encoding="utf-8")
        if done.returncode not in DONE_CODES:
            raise RuntimeError(f"{verb}: exit code {done.returncode}\n{done.stderr}")
        print(f"{verb}: exit code {done.returncode}", flush=True)
    num_objects = save_bundle(open_store(settings), RUN, wish.work / BUNDLE)
    print(json.dumps({"bundle": str(wish.work / BUNDLE), "objects": num_objects}))


def figures_of(before: Progress, after: Progress, seconds: float) -> list[Figure]:
    """Of this call: what was answered before it counts for none of its rates."""
    num_answered = after.num_prompts_done - before.num_prompts_done
    figures = [
        Figure("headline.completions", after.num_prompts_done, None, "higher", "completions"),
    ]
    if num_answered:
        rate = num_answered / seconds
        figures.append(Figure("headline.generation", rate, None, "higher", "completions/s"))
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("prompts", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--chat-template", type=Path, help="in place of the model's own")
    parser.add_argument("--samples", type=int, default=3, help="answers to a prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of generation, at most")
    parser.add_argument("--machine", default="", help="as results name it")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
