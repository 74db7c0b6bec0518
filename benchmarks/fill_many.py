"""Several engines with a worker each against one of each: does a node make N times what one makes?

    python -m benchmarks.fill_many --engine-url URL --engine-url URL --model FOLDER
    python -m benchmarks.fill_many --quick

All workers share a run, a Redis and an S3, as on a node. First the first engine alone with its
worker, then all of them at once, by the engines' own counters of decoded tokens as in fill_live.py.
The engines must run with --enable-metrics. `--quick`: two simulated ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.fill import VERSIONS
from benchmarks.fill_live import GOAL, SAMPLING, WORDS, count, flush_cache, template_of
from benchmarks.fleet_run import (
    Prompts,
    at_engine,
    get_json,
    plan_run,
    running_worker,
    simulated_engine,
    until,
    write_prompts,
)
from benchmarks.machine import describe_cpu
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import embedded_services
from dflash_workers.launcher import Child
from producer.api import Run
from tests.tiny_model import make_tiny_model

LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Crew:
    """Engines, and how they are measured."""

    urls: Sequence[str]
    model_dir: Path
    limit: int  # requests in flight in each
    seconds: float  # measured, after `cut_s`
    cut_s: float
    num_prompts: int  # planned for each engine: more than it can answer meanwhile


@dataclass(frozen=True, slots=True)
class Made:
    """By a crew together."""

    tokens_per_s: float
    requests_per_s: float
    fill: float  # mean running requests over the limit


def main(arguments: list[str]) -> int:
    """The command; 1 where a goal is missed."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fill-many-") as scratch, ExitStack() as engines:
        folder = Path(scratch)
        if options.quick:
            crew = quick_crew(folder, engines)
        else:
            crew = Crew(
                options.engine_url,
                options.model,
                options.in_flight,
                options.seconds,
                10.0,
                options.prompts,
            )
        figures = figures_of(crew, *measure(crew, folder), options.machine)
    print_figures(figures)
    if options.out:
        num = len(crew.urls)
        found = circumstances(f"{options.machine}, {describe_cpu()}", VERSIONS)
        name, title = f"fill_many_{options.machine}", f"{num} engines and workers on one node"
        write_figures(options.out, name, title, figures, found, f"{crew.limit} in flight in each.")
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def quick_crew(folder: Path, engines: ExitStack) -> Crew:
    """Two simulated engines, which end with `engines`; slow ones, so that the CPU is no limit."""
    model_dir = make_tiny_model(folder / "model")
    urls = [
        engines.enter_context(
            simulated_engine(
                model_dir,
                folder / f"engine-{number}.log",
                max_running=8,
                mean_tokens=100,
                step_ms=20.0,
            )
        )
        for number in range(2)
    ]
    return Crew(urls, model_dir, 8, 6.0, 1.0, 8 * 40)


def measure(crew: Crew, folder: Path) -> tuple[Made, Made]:
    """One engine alone, and all of them."""
    settings = Settings(model=str(crew.model_dir))
    with embedded_services(
        folder / "services", settings, external_redis=False, external_s3=False
    ) as settings:
        one = dataclasses.replace(crew, urls=crew.urls[:1])
        return _measure(one, settings, folder / "one"), _measure(crew, settings, folder / "all")


def figures_of(crew: Crew, one: Made, many: Made, machine: str) -> list[Figure]:
    """The ratio to so many times one, and what it is made of."""
    num, prefix = len(crew.urls), f"fill.{machine}_{crew.limit}"
    ratio = many.tokens_per_s / (num * one.tokens_per_s)
    return [
        Figure(f"{prefix}_{num}_engines_to_one", ratio, GOAL, "higher", "ratio"),
        Figure(f"{prefix}_1_engine", one.tokens_per_s, None, "higher", "tokens/s"),
        Figure(f"{prefix}_{num}_engines", many.tokens_per_s, None, "higher", "tokens/s"),
        Figure(f"{prefix}_{num}_requests", many.requests_per_s, None, "higher", "requests/s"),
        Figure(f"{prefix}_{num}_fill", many.fill, GOAL, "higher", "ratio"),
    ]


def _measure(crew: Crew, settings: Settings, folder: Path) -> Made:
    folder.mkdir()
    prompts = Prompts(crew.num_prompts * len(crew.urls), WORDS)
    file = write_prompts(folder / "prompts.jsonl", prompts)
    settings = at_engine(settings, crew.urls[0], f"many-{len(crew.urls)}", crew.limit)
    with plan_run(settings, file, prompts, template_of(SAMPLING)) as run, ExitStack() as workers:
        for url in crew.urls:
            flush_cache(url)
        children = [
            workers.enter_context(
                running_worker(
                    dataclasses.replace(settings, engine_url=url, slot=f"worker-{number}"),
                    folder / f"worker-{number}.log",
                )
            )
            for number, url in enumerate(crew.urls)
        ]
        until(lambda: _num_running(crew) >= len(crew.urls) * crew.limit // 2, children)
        return _watch(crew, run, children)


def _watch(crew: Crew, run: Run, children: list[Child]) -> Made:
    time.sleep(crew.cut_s)
    before = [count(url) for url in crew.urls]
    ends = time.monotonic() + crew.seconds
    running = []
    while time.monotonic() < ends:
        running.append(_num_running(crew))
        time.sleep(LOOK_S)
    between = [count(url).since(b) for url, b in zip(crew.urls, before, strict=True)]
    for child in children:
        if child.poll() is not None:
            raise RuntimeError(f"the {child.name} ended:\n{child.tail()}")
    if run.progress().num_batches_done == run.progress().num_batches:
        raise RuntimeError("the prompts were over before the time was: plan more (--prompts)")
    return Made(
        sum(one.decoded / one.at_s for one in between),
        sum(one.finished / one.at_s for one in between),
        statistics.fmean(running) / (crew.limit * len(crew.urls)),
    )


def _num_running(crew: Crew) -> int:
    """Requests in all engines now."""
    answers = [get_json(f"{url}/v1/loads?include=core") for url in crew.urls]
    return sum(load["num_running_reqs"] for answer in answers for load in answer["loads"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two simulated engines")
    parser.add_argument("--engine-url", action="append", default=[], help="once for each engine")
    parser.add_argument("--model", type=Path, help="folder of the model that they serve")
    parser.add_argument("--in-flight", type=int, default=128, help="in each engine")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--prompts", type=int, default=6000, help="planned for each engine")
    parser.add_argument("--machine", default="local", help="its short name, for figures and files")
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
