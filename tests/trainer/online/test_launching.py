"""`train --ranks N`: all ranks of a machine, with one command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from dflash_workers.contract.errors import BadInput, FleetError, Missing, Permanent, Transient
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, renamed, spec_of
from trainer.cli.drafter import check_training
from trainer.online import launching
from trainer.online.recipe import TrainJob
from trainer.online.train import train
from trainer.recipes import named_recipe

CHANGES = ["num_steps=40", "num_microbatches=2", "data.batch_size=2", "save_every=5"]
LIMIT_S = 400


@pytest.fixture
def run(store: Store, qwen_dir: Path) -> str:
    """Four shards, sealed."""
    run = GrowingRun(store, 4, renamed(spec_of(qwen_dir), "r"))
    for shard in range(4):
        run.put(shard)
    run.seal()
    return run.spec.run


class Command:
    """`train` on that run, as a person starts it."""

    def __init__(self, settings: Settings, model_dir: Path, folder: Path) -> None:
        self.settings = replace(settings, run="r", model=str(model_dir))
        self.out = folder / "out"
        self.log = folder / "log"
        self._processes: list[psutil.Popen] = []

    def start(self, *flags: str, changes: Sequence[str] = CHANGES) -> psutil.Popen:
        sets = [part for change in changes for part in ("--set", change)]
        command = [sys.executable, "-m", "trainer.online.train", "--out", str(self.out)]
        with self.log.open("wb") as log:
            process = psutil.Popen(
                [*command, *sets, *flags],
                env={**os.environ, **self.settings.environment()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def losses(self) -> list[float]:
        path = self.out / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [orjson.loads(line)["loss"] for line in lines]

    def close(self) -> None:
        for process in self._processes:
            if process.is_running():
                for each in (*process.children(recursive=True), process):
                    each.kill()
                process.wait(30)


@pytest.fixture
def command(run: str, settings: Settings, qwen_dir: Path, tmp_path: Path) -> Iterator[Command]:
    command = Command(settings, qwen_dir, tmp_path)
    yield command
    command.close()


def rank_of(launcher: psutil.Popen, rank: int) -> psutil.Process:
    for child in launcher.children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no rank {rank}")


@pytest.mark.slow
def test_a_killed_rank_is_named_and_an_elastic_job_goes_on_by_itself_to_the_same_losses(
    store: Store, command: Command, qwen_dir: Path, tmp_path: Path
) -> None:
    unbroken = TrainJob(named_recipe("smollm2_cpu", CHANGES), str(qwen_dir), tmp_path / "unbroken")
    wanted: list[float] = []
    train(store, "r", job=unbroken, on_step=lambda record: wanted.append(record.loss))

    launcher = command.start("--ranks", "2", "--elastic")
    deadline = time.monotonic() + LIMIT_S
    while len(command.losses()) < 7:
        assert launcher.is_running() and time.monotonic() < deadline, command.log.read_text()
        time.sleep(0.01)
    killed = rank_of(launcher, 1)
    killed.kill()
    code = launcher.wait(LIMIT_S)

    said = command.log.read_text()
    assert code == 0, said
    assert f"rank 1 (process {killed.pid}) was killed by SIGKILL: all ranks start again" in said
    assert "Traceback" not in said and said.count("killed by") == 1
    assert command.losses() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_sigterm_before_the_first_step_ends_all_ranks_with_0_and_one_line(command: Command) -> None:
    launcher = command.start("--ranks", "2")
    deadline = time.monotonic() + LIMIT_S
    while not command.out.exists():  # made once a rank looks around, long before a step
        assert launcher.is_running() and time.monotonic() < deadline, command.log.read_text()
        time.sleep(0.01)

    launcher.send_signal(signal.SIGTERM)
    code = launcher.wait(LIMIT_S)

    said = command.log.read_text()
    assert code == 0, said
    assert "Traceback" not in said and "is gone" not in said
    assert "the same command" in said


def test_what_is_wrong_for_all_ranks_is_said_once_before_any_begins(
    run: str, settings: Settings, qwen_dir: Path
) -> None:
    settings = replace(settings, run=run, model=str(qwen_dir))

    with pytest.raises(BadInput, match="num_microbatches=2 a step can't feed 3 drafters"):
        check_training(settings, "smollm2_cpu", CHANGES, 3)
    with pytest.raises(Missing):
        check_training(replace(settings, run="other"), "smollm2_cpu", CHANGES, 2)
    check_training(settings, "smollm2_cpu", CHANGES, 2)


def test_the_launchers_own_flags_are_not_handed_to_ranks() -> None:
    given = ["--run", "r", "--ranks", "4", "--elastic", "--name", "n", "--ranks=2", "--json"]

    handed = launching._without_own_flags(given)

    assert handed == ["--run", "r", "--name", "n", "--json"]


@pytest.mark.parametrize(
    ("exit_codes", "expected", "named"),
    [
        ([1, -signal.SIGTERM], Permanent, "rank 0 could not go on"),
        ([-signal.SIGTERM, -signal.SIGKILL, 1], Transient, "rank 1 .* killed by SIGKILL"),
        ([-signal.SIGTERM, -signal.SIGTERM], Transient, "rank 0 .* killed by SIGTERM"),
    ],
)
def test_who_was_ended_by_the_launcher_is_not_the_cause(
    tmp_path: Path, exit_codes: list[int], expected: type[FleetError], named: str
) -> None:
    end = launching._end_of(
        {
            rank: ProcessFailure(rank, 100 + rank, code, str(tmp_path / f"{rank}.json"))
            for rank, code in enumerate(exit_codes)
        }
    )

    assert isinstance(end, expected)
    assert re.search(named, str(end))


def test_a_rank_that_spoke_is_the_cause_and_not_those_that_were_lost_with_it(
    tmp_path: Path,
) -> None:
    lost = tmp_path / "lost.json"
    lost.write_bytes(orjson.dumps({"message": {"message": "gone", "extraInfo": {"timestamp": 1}}}))

    end = launching._end_of(
        {
            0: ProcessFailure(0, 100, 1, str(lost)),
            1: ProcessFailure(1, 101, 1, str(tmp_path / "none")),
        }
    )

    assert isinstance(end, Permanent) and "rank 1" in str(end)


def test_a_terminal_that_goes_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []

    def launch(config: LaunchConfig, _program: str) -> Callable[..., None]:
        handled.append(config.signals_to_handle)
        return lambda *_: None

    monkeypatch.setattr(launching, "elastic_launch", launch)

    launching._live_on(["-c", "pass"], 2, tmp_path, is_elastic=False)

    assert handled == ["SIGTERM,SIGINT"]
