"""`dflash-fleet bench` on a real engine, over a run that is planned for it alone.

    python -m benchmarks.knee --engine-url URL --model FOLDER [--out FOLDER]

Where no run stands that could be asked about: Redis and S3 are started, some thousand prompts are
planned as fill_live.py plans them, and the verb itself measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.fill_live import SAMPLING, WORDS, template_of
from benchmarks.fleet_run import Prompts, plan_run, write_prompts
from dflash_workers.contract.settings import Settings
from dflash_workers.embedded import embedded_services

NUM_PROMPTS = 4096


def main(arguments: list[str]) -> int:
    """The command; what follows its own flags goes to `bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of what it serves")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results")
    args, others = parser.parse_known_args(arguments)
    wanted = Settings(model=str(args.model), engine_url=args.engine_url, run="knee")
    with tempfile.TemporaryDirectory(prefix="knee-") as scratch:
        folder = Path(scratch)
        with embedded_services(
            folder / "services", wanted, external_redis=False, external_s3=False
        ) as settings:
            prompts = Prompts(NUM_PROMPTS, WORDS)
            file = write_prompts(folder / "prompts.jsonl", prompts)
            plan_run(settings, file, prompts, template_of(SAMPLING)).close()
            command = [sys.executable, "-m", "fleet", "bench", "--json", f"--out={args.out}"]
            environ = os.environ | dataclasses.replace(settings, slot="").environment()
            return subprocess.run([*command, *others], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
