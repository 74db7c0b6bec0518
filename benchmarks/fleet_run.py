"""A fleet of one for the programs beside this file: services, a planned run, a worker, an engine.

Real parts all through: Redis and S3 as embedded.py starts them, a run planned by the producer, and
the worker as `dflash-fleet worker` starts it, in a process of its own whose CPU time can be read.
Only the engine may be simulated (the package simulated).
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import free_ports
from dflash_workers.launcher import Child, spawn
from producer.api import EnqueueOptions, Run, RunOptions

ROOT = Path(__file__).resolve().parent.parent
READY_S = 120.0  # for a worker or an engine on a busy machine
POLL_S = 0.1
NUM_WORDS = 5000

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is planned: distinct texts, the same at every call."""

    count: int
    words: int  # each
    batch_size: int = 64


def write_prompts(path: Path, prompts: Prompts) -> Path:
    """As JSON lines, of made-up words."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
    with path.open("wb") as file:
        for number in range(prompts.count):
            text = "Tell a story with these words: " + " ".join(
                draw.choices(words, k=prompts.words)
            )
            row = {"id": f"prompt-{number}", "messages": [{"role": "user", "content": text}]}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return path


def plan_run(settings: Settings, file: Path, prompts: Prompts, options: RunOptions) -> Run:
    """A sealed run with all its hints in the queue."""
    run = Run.create(settings, settings.model, options)
    run.enqueue(file, EnqueueOptions(batch_size=prompts.batch_size, heldout=0))
    run.seal()
    return run


@contextmanager
def running_worker(settings: Settings, log_path: Path, *flags: str) -> Iterator[Child]:
    """A worker process; it is told to go at the end, and says what it leaves."""
    argv = [sys.executable, "-m", "fleet", "worker", *flags]
    environ = os.environ | settings.environment() | {"OMP_NUM_THREADS": "1"}
    child = spawn(argv, name="worker", log_path=log_path, environ=environ, cwd=ROOT)
    try:
        yield child
    finally:
        child.stop()


@contextmanager
def simulated_engine(model_dir: Path, log_path: Path, **flags: float | str) -> Iterator[str]:
    """Its URL. Flags as the program's own, with _ for -."""
    with simulated_process(model_dir, log_path, **flags) as (url, _):
        yield url


@contextmanager
def simulated_process(
    model_dir: Path, log_path: Path, **flags: float | str
) -> Iterator[tuple[str, Child]]:
    """The URL of one, and its process."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "benchmarks.simulated", f"--model={model_dir}"]
    argv += [f"--port={port}", *(f"--{k.replace('_', '-')}={v}" for k, v in flags.items())]
    with spawn(argv, name="engine", log_path=log_path, cwd=ROOT) as child:
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_up(url), [child])
        yield url, child


def is_up(url: str) -> bool:
    """Whether it answers that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def get_json(url: str) -> Facts:
    """The object at the URL."""
    with urllib.request.urlopen(url, timeout=30) as reply:
        return dict(orjson.loads(reply.read()))


def until(holds: Callable[[], bool], children: list[Child], timeout_s: float = READY_S) -> None:
    """Wait until it holds. Raises RuntimeError when time is over or a child ended."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        for child in children:
            if child.poll() is not None:
                raise RuntimeError(f"the {child.name} ended:\n{child.tail()}")
        if time.monotonic() > deadline:
            tails = "\n".join(child.tail() for child in children)
            raise RuntimeError(f"it took longer than {timeout_s:g} s:\n{tails}")
        time.sleep(POLL_S)


def cpu_s(child: Child) -> float:
    """CPU seconds of the process so far, all its threads."""
    times = psutil.Process(child.pid).cpu_times()
    return float(times.user + times.system)


def make_long_context(model_dir: Path, context_len: int) -> None:
    """Have the folder's config promise a context of so many tokens."""
    path = model_dir / "config.json"
    config = orjson.loads(path.read_bytes()) | {"max_position_embeddings": context_len}
    path.write_bytes(orjson.dumps(config))


def at_engine(settings: Settings, url: str, run: str, limit: int) -> Settings:
    """The settings of one run and its worker."""
    return dataclasses.replace(
        settings, engine_url=url, run=run, max_in_flight=limit, slot=f"{run}-worker"
    )
