"""The command: goes through the parts, keeps what they leave, writes the figures after each."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import orjson
import torch

from benchmarks import paired
from benchmarks.figures import Circumstances, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.paired.parts import Part, Real, all_parts, quick_parts
from benchmarks.paired.results import figures_of
from dflash_workers.contract.records import Json

LEAST_S = 45.0  # a part that has less time left doesn't begin


def main(arguments: list[str]) -> int:
    """1 where a part failed, did not fit, or missed a goal."""
    options = _parser().parse_args(arguments)
    if not options.quick and torch.cuda.device_count() < options.gpus:
        print(f"this needs {options.gpus} CUDA GPUs: try --quick", file=sys.stderr)
        return 1
    real = Real(options.model, options.answers) if options.model and options.answers else None
    parts = quick_parts() if options.quick else all_parts(options.gpus, real)
    with tempfile.TemporaryDirectory(prefix="paired-") as scratch:
        out = options.out or Path(scratch)
        run = Run(out, Path(scratch), options, time.monotonic() + options.budget_s)
        is_whole = all([run.do(part) for part in parts])
    figures = figures_of(run.found, is_gpu=not options.quick)
    print_figures(figures)
    return 0 if is_whole and all(figure.is_met is not False for figure in figures) else 1


class Run:
    """What has been found so far, in memory and in `out`."""

    def __init__(self, out: Path, scratch: Path, options: argparse.Namespace, until: float) -> None:
        self.found: dict[str, Json] = {}
        self._out = out
        self._scratch = scratch
        self._options = options
        self._until = until

    def do(self, part: Part) -> bool:
        """Whether its result is there."""
        kept = self._out / "parts" / f"{part.name}.json"
        if kept.exists():
            self.found[part.name] = orjson.loads(kept.read_bytes())
            return True
        left_s = self._until - time.monotonic()
        if left_s < LEAST_S:
            print(f"{part.name}: {left_s:.0f} s are left: not begun", file=sys.stderr)
            return False
        began = time.monotonic()
        try:
            left = part.do(self._scratch / part.name, min(part.limit_s, left_s))
        except RuntimeError as error:
            print(f"{part.name}: {error}", file=sys.stderr, flush=True)
            return False
        print(f"{part.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(orjson.dumps(left))
        self.found[part.name] = left
        if not self._options.quick:
            self._write()
        return True

    def _write(self) -> None:
        num_gpus = self._options.gpus
        found = self._circumstances()
        name = f"paired_{found.machine.split()[-1].lower()}x{num_gpus}"
        title = f"Paired and colocated training, {num_gpus} GPUs"
        figures = figures_of(self.found, is_gpu=True)
        write_figures(self._out, name, title, figures, found, _prose())

    def _circumstances(self) -> Circumstances:
        machine = f"{describe_cpu()}; {self._options.gpus} x {torch.cuda.get_device_name()}"
        return circumstances(machine, ("torch", "triton", "transformers", "numpy"))


def _prose() -> str:
    (about,) = (text for text in (paired.__doc__ or "").split("\n\n") if text.startswith("Parts"))
    return about.replace("\n", " ").strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paired", description=(paired.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes over gloo, any machine")
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
    parser.add_argument("--out", type=Path, help="folder for results; what is there is kept")
    parser.add_argument("--model", type=Path, help="folder of a small real target")
    parser.add_argument("--answers", type=Path, help="of that target, by short_training")
    parser.add_argument("--budget-s", type=float, default=460.0, help="no part goes on for longer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
