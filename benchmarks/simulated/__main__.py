"""The command of the simulated engines: flags to engines, which serve until they are killed.

The flags are described in the package's docstring.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
from pathlib import Path

from benchmarks.simulated.answers import Answers
from benchmarks.simulated.engine import Engine, Limits
from benchmarks.simulated.lengths import LONGEST, Lengths
from benchmarks.simulated.pace import Drafter, Pace, linear_steps
from benchmarks.simulated.presets import PRESETS
from benchmarks.simulated.replies import Replies, Target
from benchmarks.simulated.server import EngineServer
from benchmarks.simulated.token_log import TokenLog

STEP_MS = 1.0


def main() -> None:
    """The command."""
    import uvloop  # Linux alone has it

    uvloop.run(serve(parser().parse_args()))


def parser() -> argparse.ArgumentParser:
    """All flags."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.simulated")
    flags.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    where = flags.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="of one engine")
    where.add_argument("--ports", help="of several, with commas")
    flags.add_argument("--preset", choices=sorted(PRESETS), help="an engine that was measured")
    flags.add_argument("--time-factor", type=float, default=1.0)
    flags.add_argument("--max-running", type=int)
    flags.add_argument("--kv-tokens", type=int)
    flags.add_argument("--step-ms", type=float)
    flags.add_argument("--per-request-ms", type=float, default=0.0)
    flags.add_argument("--knee", type=int, default=0, help="requests; 0: none")
    flags.add_argument("--collapse", type=float, default=1.0, help="of the pace past the knee")
    flags.add_argument("--prefill-tokens-per-s", type=float, help="0: prefill is free")
    flags.add_argument("--prefill-base-ms", type=float)
    flags.add_argument("--chunk-tokens", type=int, help="of a prefill's batch")
    flags.add_argument("--drafter", type=Path, help="folder with simulated.json")
    flags.add_argument("--mean-tokens", type=float, default=1600.0)
    flags.add_argument("--variation", type=float, default=1.0)
    flags.add_argument("--tail-share", type=float, default=0.0)
    flags.add_argument("--longest", type=int, default=LONGEST, help="answer")
    flags.add_argument("--served-model", help="name; the folder's path otherwise")
    flags.add_argument("--weights", default="", help="others have other log-probabilities")
    flags.add_argument("--token-log", type=Path)
    return flags


async def serve(args: argparse.Namespace) -> None:
    """Until it is killed."""
    pace, limits = pace_of(args), limits_of(args)
    lengths = Lengths(args.mean_tokens, args.variation, args.tail_share, args.longest)
    answers = Answers(args.model, lengths)
    target = Target(str(args.model), args.served_model or str(args.model), args.weights)
    replies, log = Replies(answers, target, pace.drafter), TokenLog(args.token_log)
    for port in map(int, args.ports.split(",")) if args.ports else [args.port]:
        engine = Engine(str(port), answers, pace, limits, log)
        await EngineServer(engine, replies, port).listen()
    gc.freeze()
    await asyncio.Event().wait()


def pace_of(args: argparse.Namespace) -> Pace:
    """The preset's, or one step for all, with what the flags change."""
    pace = PRESETS[args.preset].pace if args.preset else Pace(linear_steps(STEP_MS / 1e3))
    if args.step_ms is not None:
        base_s, per_request_s = args.step_ms / 1e3, args.per_request_ms / 1e3
        pace = dataclasses.replace(
            pace, steps=linear_steps(base_s, per_request_s, args.knee, args.collapse)
        )
    prefill = pace.prefill
    wanted = {
        "tokens_per_s": args.prefill_tokens_per_s,
        "base_s": None if args.prefill_base_ms is None else args.prefill_base_ms / 1e3,
        "chunk_tokens": args.chunk_tokens,
    }
    for name, value in wanted.items():
        prefill = prefill if value is None else dataclasses.replace(prefill, **{name: value})
    drafter = Drafter.read(args.drafter) if args.drafter else None
    return dataclasses.replace(pace, prefill=prefill, drafter=drafter, time_factor=args.time_factor)


def limits_of(args: argparse.Namespace) -> Limits:
    """The preset's, or what is usual, where no flag says otherwise."""
    preset = PRESETS[args.preset] if args.preset else None
    usual = Limits(preset.max_running, preset.kv_tokens) if preset else Limits()
    return Limits(
        usual.max_running if args.max_running is None else args.max_running,
        usual.kv_tokens if args.kv_tokens is None else args.kv_tokens,
    )


if __name__ == "__main__":
    main()
