"""One promotion on real engines: two nodes on one GPU, and what it did to the run's rate.

Called by promotion.sh. Plans a run that outlasts it, starts two `dflash-fleet node`, each with one
engine without a drafter, waits until both are full, and hands the drafter to `dflash-fleet
promote`. The rates are the workers' own, by their own clocks, summed over both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.fleet_run import ROOT, Facts, until
from benchmarks.h200.headline.generate import DONE_CODES, opened
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.heartbeats import Beat
from dflash_workers.launcher import Child, spawn
from dflash_workers.promotion.observing import Fleet
from producer.api import EnqueueOptions, Run, RunOptions

RUN = "promotion"
READY_S = 420.0  # two engines that compile their kernels
PROMOTED_S = 900.0
FULL_SHARE = 0.9  # of the limit: then an engine is at work
BASE_PORT = 32000
OPTIONS = RunOptions(max_new_tokens=320, temperature=0.8, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is promoted, and where."""

    prompts: Path
    out: Path  # results and logs
    drafter: Path
    node_flags: tuple[str, ...]
    promote_flags: tuple[str, ...]
    num_samples: int  # of each prompt: the run must outlast the promotion
    watch_s: float  # of each rate
    options: RunOptions


def main(arguments: list[str]) -> int:
    """The command; 0 whatever the verdict."""
    args = _parser().parse_args(arguments)
    template = args.chat_template and args.chat_template.read_text(encoding="utf-8")
    node_flags = ["--engine-python", str(args.engine_python), *shlex.split(args.node_flags)]
    if args.engine_flags:
        node_flags += ["--engine-arg", args.engine_flags]
    wish = Wish(
        args.work / "prompts",
        args.out,
        args.drafter,
        tuple(node_flags),
        tuple(args.promote_flags),
        args.samples,
        args.watch_s,
        dataclasses.replace(OPTIONS, chat_template=template or None),
    )
    with opened(args.work, args.model, RUN) as settings:
        settings = dataclasses.replace(settings, max_in_flight=args.in_flight)
        with planned(settings, wish), running_nodes(settings, wish) as nodes:
            facts = promote_one(settings, wish, nodes)
    (wish.out / "promotion_rates.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts))
    return 0


def promote_one(settings: Settings, wish: Wish, nodes: list[Child]) -> Facts:
    """The rates before and after, and how long it took."""
    with open_redis(settings, timeout_s=10) as client:
        fleet = Fleet(client, RedisKeys(settings.redis_prefix), settings.public_redis_url())
        await_full(fleet, nodes)
        before = tokens_per_s(fleet.beats, wish.watch_s)
        print(f"before: {before:.0f} tokens/s", flush=True)
        began = time.monotonic()
        verdict = promote(settings, wish)
        seconds = time.monotonic() - began
        print(verdict.get("why"), flush=True)
        until(lambda: has_followed(fleet, verdict["number"]), nodes, READY_S)
        await_full(fleet, nodes)
        after = tokens_per_s(fleet.beats, wish.watch_s)
    return {
        "promoted": verdict["promoted"],
        "seconds": seconds,
        "before_tokens_per_s": before,
        "after_tokens_per_s": after,
    }


def has_followed(fleet: Fleet, number: int) -> bool:
    """Whether each engine serves what the log's entry says."""
    served = fleet.served(RUN).values()
    return all(engine.is_ready and engine.entry >= number for engine in served)


def promote(settings: Settings, wish: Wish) -> Facts:
    """What the verb says, which is also written down."""
    command = [sys.executable, "-m", "fleet", "promote", str(wish.drafter), "--json"]
    done = subprocess.run(
        [*command, *wish.promote_flags],
        cwd=ROOT,
        env=os.environ | settings.environment(),
        capture_output=True,
        text=True,
        timeout=PROMOTED_S,
    )
    if done.returncode not in DONE_CODES:
        raise RuntimeError(f"promote: exit code {done.returncode}\n{done.stderr}")
    (wish.out / "promotion.json").write_text(done.stdout, encoding="utf-8")
    return dict(orjson.loads(done.stdout))


@contextmanager
def planned(settings: Settings, wish: Wish) -> Iterator[Run]:
    """A sealed run with its hints in the queue."""
    with Run.create(settings, settings.model, wish.options) as run:
        if not run.progress().sealed:
            files = sorted((wish.prompts / "train").glob("*.jsonl"))
            run.enqueue(files, EnqueueOptions(samples=wish.num_samples, heldout=0, shuffle=0))
            run.seal()
        yield run


@contextmanager
def running_nodes(settings: Settings, wish: Wish) -> Iterator[list[Child]]:
    """Two, each with an engine and a worker of its own."""
    with ExitStack() as running:
        nodes = []
        for number in range(2):
            argv = [sys.executable, "-m", "fleet", "node", *wish.node_flags]
            argv += ["--base-port", str(BASE_PORT + 100 * number)]
            argv += ["--state", str(wish.out / f"node_{number}")]
            node = spawn(
                argv,
                name=f"node {number}",
                log_path=wish.out / f"node_{number}.log",
                environ=os.environ | settings.environment(),
                cwd=ROOT,
            )
            running.callback(node.stop, 30)
            nodes.append(node)
        yield nodes


def await_full(fleet: Fleet, nodes: list[Child]) -> None:
    """Until both workers have as many requests running as they may."""

    def is_full(beat: Beat) -> bool:
        limit = beat.number("max_in_flight") or 0.0
        return limit > 0 and (beat.number("in_flight") or 0.0) >= FULL_SHARE * limit

    until(lambda: sum(map(is_full, fleet.beats().values())) == len(nodes), nodes, READY_S)


def tokens_per_s(read: Callable[[], Mapping[str, Beat]], seconds: float) -> float:
    """Of all workers that were up all the while."""
    first = read()
    time.sleep(seconds)
    last = read()
    rates = []
    for slot in first.keys() & last.keys():
        grown = [
            (last[slot].number(name) or 0.0) - (first[slot].number(name) or 0.0)
            for name in ("tokens", "uptime_s")
        ]
        rates.append(grown[0] / grown[1] if grown[1] > 0 else 0.0)
    return sum(rates)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("work", "out", "drafter", "engine-python"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--chat-template", type=Path, help="in place of the model's own")
    parser.add_argument("--engine-flags", default="", help="more flags of both engines")
    parser.add_argument("--node-flags", default="", help="more flags of both nodes")
    parser.add_argument("--in-flight", type=int, default=48, help="requests in each engine")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--watch-s", type=float, default=30.0, help="of each rate")
    parser.add_argument("promote_flags", nargs="*", help="of `promote`, after a --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
