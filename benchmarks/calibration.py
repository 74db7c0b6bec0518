"""Whether a simulated engine is as fast as the one that it stands for, and what it costs.

    python -m benchmarks.calibration [--quick] [--out benchmarks/results]

A bare client asks it what the real one was asked when it was measured: so many requests at once,
four waves of them, 128 prompt tokens and 256 new ones each. A figure is its tokens per second over
the real one's; of the drafter that was measured, too. The clock is the real one, and a client on a
busy machine is late: the engine runs at three quarters of its speed, where that counts less. Last
comes the CPU that its process takes for a reply of 200 tokens in one piece. --quick: two waves, at
its own speed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import uvloop

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.fleet_run import cpu_s, simulated_engine, simulated_process
from benchmarks.machine import describe_cpu
from benchmarks.simulated.presets import DRAFTERS, PRESETS
from tests.tiny_model import make_tiny_model

PRESET, DRAFTER = "h200_smollm2", "h200_smollm2_random"
# Tokens per second of the real one, by the requests at once.
PLAIN = {1: 447.0, 48: 17_720.0, 128: 38_126.0, 256: 56_052.0, 512: 16_099.0}
DRAFTED = {1: 208.0, 48: 7_844.0}
PROMPT_TOKENS, NEW_TOKENS = 128, 256
MOST_OFF = 0.1
CPU_GOAL_MS = 0.3
VERSIONS = ("aiohttp", "uvloop")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked, and how fast."""

    num_waves: int
    time_factor: float


FULL, QUICK = Effort(4, 0.75), Effort(2, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of it."""

    num_at_once: int
    num_requests: int  # in all
    new_tokens: int  # of each


@dataclass(frozen=True, slots=True)
class Engine:
    """One that was measured."""

    name: str  # in figures
    real: dict[int, float]
    flags: dict[str, str]


def main(arguments: list[str]) -> int:
    """The command; 1 where a figure is too far off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args(arguments)
    figures = measure(QUICK if args.quick else FULL)
    print_figures(figures)
    if args.out:
        found = circumstances(f"local, {describe_cpu()}", VERSIONS)
        source = f"The real one: {PRESETS[PRESET].source}."
        write_figures(args.out, "simulated_cpu2", "The simulated engine", figures, found, source)
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def measure(effort: Effort) -> list[Figure]:
    """Each engine's pace over the real one's, by its requests at once, after the worst of them."""
    with tempfile.TemporaryDirectory(prefix="calibration-") as scratch:
        folder = Path(scratch)
        model_dir = make_tiny_model(folder / "model")
        drafter = write_drafter(folder / "drafter")
        engines = (
            Engine("tokens", PLAIN, {}),
            Engine("drafted_tokens", DRAFTED, {"drafter": str(drafter)}),
        )
        ratios = {
            f"simulated.{engine.name}_{num_at_once}": ratio
            for engine in engines
            for num_at_once, ratio in ratios_of(engine, model_dir, effort).items()
        }
        engine_cpu_ms = cpu_ms(model_dir)
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    return [
        Figure("simulated.pace_error", worst, MOST_OFF, "lower", "share"),
        *(Figure(name, ratio, None, "higher", "ratio") for name, ratio in ratios.items()),
        Figure("simulated.cpu_ms", engine_cpu_ms, CPU_GOAL_MS, "lower", "ms"),
    ]


def ratios_of(engine: Engine, model_dir: Path, effort: Effort) -> dict[int, float]:
    """Simulated over real tokens per second, by the requests at once."""
    flags: dict[str, float | str] = {"preset": PRESET, "time_factor": effort.time_factor}
    log_path = model_dir.parent / f"{engine.name}.log"
    with simulated_engine(model_dir, log_path, **flags, **engine.flags) as url:
        return {
            num_at_once: uvloop.run(
                tokens_per_s(url, Load(num_at_once, num_at_once * effort.num_waves, NEW_TOKENS))
            )
            / effort.time_factor
            / real
            for num_at_once, real in engine.real.items()
        }


def write_drafter(folder: Path) -> Path:
    """The one that was measured, pretended."""
    folder.mkdir()
    drafter = DRAFTERS[DRAFTER]
    facts = {
        "accept_length": drafter.accept_length,
        "step_cost": drafter.step_cost,
        "step_cost_per_request": drafter.step_cost_per_request,
    }
    (folder / "simulated.json").write_bytes(orjson.dumps(facts))
    return folder


def cpu_ms(model_dir: Path) -> float:
    """Of the engine's process, for a reply in one piece."""
    load = Load(num_at_once=48, num_requests=4000, new_tokens=200)
    log_path = model_dir.parent / "cpu.log"
    with simulated_process(model_dir, log_path, step_ms=0.2, max_running=48) as (url, child):
        uvloop.run(tokens_per_s(url, dataclasses.replace(load, num_requests=load.num_at_once)))
        before_s = cpu_s(child)
        uvloop.run(tokens_per_s(url, load))
        return (cpu_s(child) - before_s) / load.num_requests * 1e3


async def tokens_per_s(url: str, load: Load) -> float:
    """With so many requests in it all the while."""
    draw = random.Random(load.num_at_once)
    seats, num_tokens = asyncio.Semaphore(load.num_at_once), 0
    sampling = {"max_new_tokens": load.new_tokens, "ignore_eos": True}

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        async with seats:
            ids = [draw.randrange(100, 300) for _ in range(PROMPT_TOKENS)]
            body = orjson.dumps({"input_ids": ids, "sampling_params": sampling})
            async with session.post(f"{url}/generate", data=body) as reply:
                num_tokens += len(orjson.loads(await reply.read())["output_ids"])

    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout()) as session:
        started_s = time.monotonic()
        await asyncio.gather(*(ask(session) for _ in range(load.num_requests)))
        return num_tokens / (time.monotonic() - started_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
