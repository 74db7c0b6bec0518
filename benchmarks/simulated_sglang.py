"""An interpreter that starts a simulated engine in SGLang's place; `make` writes one.

For programs that let a whole `dflash-fleet node` run without GPUs. Called as the engine's own
python would be: `-c PROGRAM` for the versions, `-m sglang.launch_server --port P ...` to serve. The
pace stands in the environment of who starts the node, as the flags of the package simulated.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "SIMULATED_ENGINE_FLAGS"
VERSIONS = {"sglang": "0.5.17", "torch": "2.13.0+cpu"}
PASSED_ON = {
    "--port": "--port",
    "--model-path": "--model",
    "--max-running-requests": "--max-running",
    "--speculative-draft-model-path": "--drafter",
}


def make(folder: Path) -> Path:
    """The interpreter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    os.chmod(python, 0o755)
    return python


def main(argv: list[str]) -> None:
    """In place of this process."""
    if argv[0] == "-c":
        print(json.dumps(VERSIONS))
        return
    given = dict(itertools.pairwise(argv))
    flags = [f"{ours}={given[theirs]}" for theirs, ours in PASSED_ON.items() if theirs in given]
    engine = [sys.executable, "-m", "benchmarks.simulated", *flags]
    os.chdir(ROOT)
    os.execv(sys.executable, [*engine, *shlex.split(os.environ.get(FLAGS, ""))])


if __name__ == "__main__":
    main(sys.argv[1:])
