"""All ranks of one machine, started and kept by torch's own elastic agent: `train --ranks N`.

Called by the `train` verb in place of training; each rank is the same command again, told by the
launcher's variables which one it is. Where a rank dies the agent stops the others, which keep their
last step, and one line names it. `--elastic` then starts all of them again, from the last
checkpoint, but not after an error that a rank has spoken of, which would come again, nor more than
RESTARTS times in a row without a new checkpoint. Several machines are torchrun's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dflash_workers.contract.errors import Draining, FleetError, Permanent, Transient
from dflash_workers.contract.terminal import err
from trainer.online.checkpoint import latest_checkpoint

RESTARTS = 3  # in a row, without a checkpoint in between
LEAVING_S = 90  # for ranks to send their last checkpoint to S3; spot hosts give 120 at most


def launch(arguments: Sequence[str], *, num_ranks: int, out: Path, is_elastic: bool) -> None:
    """The verb's `arguments` by so many ranks, to their end.

    Raises Transient where a rank died, Permanent where one could not go on and has said why,
    Draining after SIGTERM, KeyboardInterrupt after Ctrl-C.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said here, once
    # Ranks that use every core each would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    command = ["-m", "trainer.online.train", "--", *_without_own_flags(arguments)]
    try:
        _live_on(command, num_ranks, out, is_elastic)
    except SignalException as error:  # the agent's way to end; all ranks have left
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise Draining("asked to stop: all ranks have left, the same command goes on") from error


def _live_on(command: Sequence[str], num_ranks: int, out: Path, is_elastic: bool) -> None:
    num_in_a_row = 0
    while True:
        began_with = latest_checkpoint(out)
        end = _one_life(command, num_ranks)
        if end is None:
            return
        newest = latest_checkpoint(out)
        num_in_a_row = 1 if newest != began_with else num_in_a_row + 1
        if not isinstance(end, Transient):
            raise end
        if not is_elastic or num_in_a_row > RESTARTS:
            raise Transient(f"{end}: the same command goes on from the last checkpoint")
        where = f"from {newest.name}" if newest else "at the beginning"
        err.print(f"{end}: all ranks start again {where}", markup=False, soft_wrap=True)


def _one_life(command: Sequence[str], num_ranks: int) -> FleetError | None:
    """Until all ranks have ended; None: well."""
    with tempfile.TemporaryDirectory(prefix="dflash-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=LEAVING_S,
            # A terminal that goes is no reason to end: nohup's word would be overridden.
            signals_to_handle="SIGTERM,SIGINT",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _end_of(error.failures)
    return None


def _end_of(failures: dict[int, ProcessFailure]) -> FleetError:
    """What became of a job whose ranks did not all end well."""
    rank, failure = min(failures.items(), key=lambda item: _blame(item[1]))
    if failure.exitcode < 0:
        return Transient(
            f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}"
        )
    if Path(failure.error_file).is_file():
        return Transient("ranks were lost, as was said above")
    return Permanent(f"rank {rank} could not go on, as was said above")


def _blame(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """The least is the cause: a killed rank, then one that spoke, then those that were lost with
    it. The launcher ends whoever is left by SIGTERM.
    """
    was_lost = failure.exitcode > 0 and Path(failure.error_file).is_file()
    return failure.exitcode == -signal.SIGTERM, was_lost, failure.exitcode


def _without_own_flags(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        is_own = argument in ("--ranks", "--elastic") or argument.startswith("--ranks=")
        if not is_value and not is_own:
            kept.append(argument)
        is_value = argument == "--ranks"
    return kept
