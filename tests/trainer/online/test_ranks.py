"""Several processes train as one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.numpy import load_file

from tests.trainer.online.rank import run
from trainer.online.checkpoint import latest_checkpoint, read_state

LIMIT_S = 240  # of one job
STEPS = 4


@dataclass
class Job:
    """Ranks under way."""

    out: Path
    ranks: list[BaseProcess]

    def wait(self) -> list[int | None]:
        deadline = time.monotonic() + LIMIT_S
        for rank in self.ranks:
            rank.join(max(1, deadline - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]

    def log(self) -> str:
        return "".join(p.read_text() for p in sorted(self.out.parent.glob("rank-*.log")))

    def records(self) -> list[dict[str, Any]]:
        return [orjson.loads(x) for x in (self.out / "metrics.jsonl").read_bytes().splitlines()]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records()]


class Jobs:
    """Forks jobs from a process that has imported all there is; leaves none behind."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.trainer.online.rank"])
        self._ranks: list[BaseProcess] = []

    def start(self, out: Path, num_ranks: int, changes: Sequence[str], steps: int = STEPS) -> Job:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out.parent.mkdir(parents=True, exist_ok=True)
        ranks = []
        for rank in range(num_ranks):
            environ = {"GLOO_SOCKET_IFNAME": "lo"}
            if num_ranks > 1:
                environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = str(out.parent / f"rank-{rank}.log")
            all_changes = [f"num_steps={steps}", *changes]
            arguments = (environ, log, str(self._model_dir), str(out), all_changes)
            ranks.append(self._context.Process(target=run, args=arguments))
            ranks[-1].start()
        self._ranks += ranks
        return Job(out, [*ranks])

    def run(self, out: Path, num_ranks: int, changes: Sequence[str], steps: int = STEPS) -> Job:
        job = self.start(out, num_ranks, changes, steps)
        assert job.wait() == [0] * num_ranks, job.log()
        return job

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()


@pytest.fixture(scope="module")
def jobs(qwen_dir: Path) -> Iterator[Jobs]:
    jobs = Jobs(qwen_dir)
    yield jobs
    jobs.close()


SIX = ["num_microbatches=6", "data.batch_size=2", "save_every=2", "evaluate_every=3"]


@pytest.fixture(scope="module")
def alone(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One process, six microbatches a step."""
    return jobs.run(tmp_path_factory.mktemp("alone") / "out", 1, SIX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_targets", "num_drafters"), [(0, 3), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2)]
)
def test_any_division_of_ranks_trains_as_one_process(
    jobs: Jobs, alone: Job, tmp_path: Path, num_targets: int, num_drafters: int
) -> None:
    changes = [*SIX, f"topology.num_targets={num_targets}"]

    job = jobs.run(tmp_path / "out", num_targets + num_drafters, changes)

    assert job.losses() == pytest.approx(alone.losses(), abs=1e-5)
    measured = [r["measured_accept_length"] for r in job.records()]
    assert measured == [
        pytest.approx(r["measured_accept_length"], abs=1e-5) for r in alone.records()
    ]
    assert [r["num_tokens"] for r in job.records()] == [r["num_tokens"] for r in alone.records()]


@pytest.mark.slow
@pytest.mark.parametrize(("num_targets", "num_ranks"), [(0, 4), (1, 3)])
def test_a_target_split_over_ranks_trains_as_one_process(
    jobs: Jobs, alone: Job, tmp_path: Path, num_targets: int, num_ranks: int
) -> None:
    split = [f"topology.num_targets={num_targets}", "topology.num_ranks_per_target=2"]

    job = jobs.run(tmp_path / "out", num_ranks, [*SIX, *split])

    assert job.losses() == pytest.approx(alone.losses(), abs=1e-5)
    measured = [r["measured_accept_length"] for r in job.records()]
    assert measured == [
        pytest.approx(r["measured_accept_length"], abs=1e-5) for r in alone.records()
    ]


@pytest.mark.slow
def test_a_sharded_drafter_trains_as_a_whole_one_and_goes_on_after_a_stop(
    jobs: Jobs, alone: Job, tmp_path: Path
) -> None:
    changes = [*SIX, "topology.shard_drafter=true"]

    job = jobs.start(tmp_path / "out", 2, [*changes, "stop_at=1"])
    assert job.wait() == [0, 0], job.log()
    jobs.run(tmp_path / "out", 2, changes, steps=STEPS)

    assert job.losses() == pytest.approx(alone.losses(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["die_at=3", "stop_at=3"])
def test_a_run_that_is_killed_or_asked_to_leave_goes_on_to_the_same_bits(
    jobs: Jobs, alone: Job, tmp_path: Path, act: str
) -> None:
    job = jobs.start(tmp_path / "out", 1, [*SIX, act])
    (code,) = job.wait()

    again = jobs.run(tmp_path / "out", 1, SIX)

    assert code == (-signal.SIGKILL if act.startswith("die") else 0), job.log()
    assert again.losses() == alone.losses()
    assert weights(again) == weights(alone)


@pytest.mark.slow
def test_ranks_that_are_asked_to_leave_leave_together_and_others_go_on(
    jobs: Jobs, alone: Job, tmp_path: Path
) -> None:
    changes = [*SIX, "topology.num_targets=1"]
    job = jobs.start(tmp_path / "out", 3, [*changes, "stop_at=2"])

    codes = job.wait()
    fewer = jobs.run(tmp_path / "out", 1, SIX)

    assert codes == [0, 0, 0], job.log()
    assert fewer.losses() == pytest.approx(alone.losses(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_dead_rank_ends_the_others_with_one_line_that_names_it_and_their_last_step_is_kept(
    jobs: Jobs, tmp_path: Path, lost: int
) -> None:
    changes = [*SIX, "topology.num_targets=1"]
    job = jobs.start(tmp_path / "out", 3, changes, steps=10_000)
    while not (job.out / "metrics.jsonl").exists() or len(job.losses()) < 2:
        assert all(rank.is_alive() for rank in job.ranks), job.log()
        time.sleep(0.05)

    job.ranks[lost].kill()
    died = time.monotonic()
    codes = job.wait()

    assert time.monotonic() - died < 30
    assert [code for rank, code in enumerate(codes) if rank != lost] == [1, 1], job.log()
    assert job.log().count("is gone") == 1, job.log()
    assert f"rank {lost} is gone: training ends here" in job.log()
    folder = latest_checkpoint(job.out)
    assert folder is not None
    assert read_state(folder).step == len(job.losses())


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_with_one_line_that_names_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs.start(tmp_path / "out", 2, [*SIX, "silence_s=5"], steps=10_000)
    while not (job.out / "metrics.jsonl").exists() or len(job.losses()) < 2:
        assert all(rank.is_alive() for rank in job.ranks), job.log()
        time.sleep(0.05)

    os.kill(job.ranks[1].pid or 0, signal.SIGSTOP)
    job.ranks[0].join(LIMIT_S)

    assert job.ranks[0].exitcode == 1
    assert "rank 1 has been silent for 5 s: training ends here" in job.log()


@pytest.mark.slow
def test_a_rank_with_an_error_of_its_own_is_the_only_one_that_speaks(
    jobs: Jobs, tmp_path: Path
) -> None:
    changes = [*SIX, "topology.num_targets=1", "optimizer.learning_rate=1e30"]

    job = jobs.start(tmp_path / "out", 2, changes, steps=50)

    assert job.wait() == [1, 1], job.log()
    assert job.log().count("dflash-fleet: ") == 1, job.log()
    assert "no weight was changed" in job.log()


def weights(job: Job) -> dict[str, bytes]:
    folder = latest_checkpoint(job.out)
    assert folder is not None
    return {name: a.tobytes() for name, a in load_file(folder / "drafter.safetensors").items()}
