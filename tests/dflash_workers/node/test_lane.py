"""lane.py and kept.py: what dies or hangs is started again, and given up loudly in the end.

The engine is a real HTTP server in a process of its own (engine_stand_in.py), the worker a real
process that sleeps; its heartbeat is what the test says it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.node import kept
from dflash_workers.node.kept import Kept, Limits, State
from dflash_workers.node.lane import Lane, LaneConfig, Patience
from dflash_workers.server import EngineConfig
from tests.dflash_workers.node import engine_stand_in

QUICK = Limits(max_failures=3, backoff_s=0.05, max_backoff_s=0.1, ready_s=20)
ALERT = Patience(probe_every_s=0.1, probe_timeout_s=0.3, silent_s=0.6, refused_s=0.6)
BEATS = {"state": "up", "in_flight": "0", "tokens_per_s": "0.0"}
WORKS = {"state": "up", "in_flight": "4", "tokens_per_s": "90.0"}


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "TICK_S", 0.05)


@pytest.fixture
def config(tmp_path: Path) -> LaneConfig:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    python = engine_stand_in.make(tmp_path / "engine")
    return LaneConfig(
        number=0,
        slot="here",
        engine=EngineConfig(python, tmp_path, port, gpu="GPU-5"),
        worker_argv=("sleep", "600"),
        worker_environ=dict(os.environ),
        logs=tmp_path / "logs",
        limits=QUICK,
        patience=ALERT,
    )


@pytest.fixture
def start() -> Iterator[Callable[[LaneConfig], Lane]]:
    leaving = threading.Event()
    lanes: list[Lane] = []

    def start(config: LaneConfig) -> Lane:
        lane = Lane(config)
        lane.heartbeat = dict(BEATS)
        lanes.append(lane)
        lane.start(leaving)
        return lane

    yield start
    leaving.set()
    for lane in lanes:
        lane.worker.stop(0)
        lane.engine.stop(0)
        lane.join(5)


Start = Callable[[LaneConfig], Lane]


def until(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.02)


def serves(*processes: Kept) -> bool:
    return all(process.state is State.SERVING for process in processes)


def test_an_engine_runs_on_its_gpu_alone_and_its_worker_starts_after_it(
    config: LaneConfig, start: Start, tmp_path: Path
) -> None:
    lane = start(config)

    until(lambda: serves(lane.engine, lane.worker))

    (begun,) = (tmp_path / "engine" / "starts").read_text().splitlines()
    assert json.loads(begun)["gpu"] == "GPU-5"
    assert lane.engine.child and lane.worker.child
    groups = {os.getsid(child.pid) for child in (lane.engine.child, lane.worker.child)}
    assert len({*groups, os.getsid(0)}) == 3


def test_an_engine_that_is_killed_is_started_again_and_its_worker_stays(
    config: LaneConfig, start: Start
) -> None:
    lane = start(config)
    until(lambda: serves(lane.engine, lane.worker))
    assert lane.engine.child and lane.worker.child
    worker_pid = lane.worker.child.pid

    os.kill(lane.engine.child.pid, signal.SIGKILL)

    until(lambda: lane.engine.num_starts == 2 and serves(lane.engine))
    assert (lane.worker.child.pid, lane.worker.num_starts) == (worker_pid, 1)


def test_a_worker_that_is_killed_is_started_again_and_its_engine_stays(
    config: LaneConfig, start: Start
) -> None:
    lane = start(config)
    until(lambda: serves(lane.engine, lane.worker))
    assert lane.worker.child

    os.kill(lane.worker.child.pid, signal.SIGKILL)

    until(lambda: lane.worker.num_starts == 2 and serves(lane.worker))
    assert lane.engine.num_starts == 1


def test_an_engine_that_hangs_is_started_again(
    config: LaneConfig, start: Start, tmp_path: Path
) -> None:
    lane = start(config)
    until(lambda: serves(lane.engine))

    (tmp_path / "engine" / "hung").touch()

    until(lambda: lane.engine.num_starts == 2)
    assert "hangs: no answer" in lane.engine.why


def test_an_engine_too_busy_for_probes_is_left_alone_while_tokens_come(
    config: LaneConfig, start: Start, tmp_path: Path
) -> None:
    lane = start(config)
    until(lambda: serves(lane.engine))
    lane.heartbeat = dict(WORKS)

    (tmp_path / "engine" / "hung").touch()
    time.sleep(3 * ALERT.silent_s)

    assert lane.engine.num_starts == 1
    assert serves(lane.engine)


def test_an_engine_that_its_worker_calls_dead_for_long_is_started_again(
    config: LaneConfig, start: Start
) -> None:
    lane = start(config)
    until(lambda: serves(lane.engine))

    lane.heartbeat = BEATS | {"state": "paused: engine: it is gone, and not back yet"}

    until(lambda: lane.engine.num_starts == 2)
    assert "says its worker" in lane.engine.why


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("oom", ["CUDA out of memory", "--mem-fraction-static"]),
        ("silent", ["not ready within 2 s", "capturing graphs"]),
        ("other", ["another server answers", "/models/another"]),
    ],
)
def test_an_engine_that_never_serves_is_given_up_with_its_last_lines(
    config: LaneConfig,
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    words: list[str],
) -> None:
    (tmp_path / "engine" / "mode").write_text(mode)
    limits = replace(QUICK, max_failures=1 if mode == "silent" else 2, ready_s=2)

    lane = start(replace(config, limits=limits))

    until(lambda: lane.engine.state is State.GIVEN_UP)
    assert lane.engine.num_starts == limits.max_failures
    assert lane.worker.state is State.WAITING
    assert [word for word in words if word not in caplog.text] == []


def test_a_port_that_is_taken_is_told_and_tried_again(config: LaneConfig, start: Start) -> None:
    with socket.create_server(("127.0.0.1", config.engine.port)):
        lane = start(replace(config, limits=replace(QUICK, max_failures=100)))
        until(lambda: lane.engine.num_starts > 1)
        why = lane.engine.why

    assert "Address already in use" in why
    until(lambda: serves(lane.engine))


def test_failures_are_forgotten_after_steady_work(config: LaneConfig, start: Start) -> None:
    lane = start(replace(config, limits=replace(QUICK, max_failures=2, steady_s=0.2)))

    def works_after(num_starts: int) -> bool:
        return lane.engine.num_starts == num_starts and serves(lane.engine)

    for num_starts in (1, 2, 3):
        until(partial(works_after, num_starts))
        time.sleep(0.4)
        assert lane.engine.child
        os.kill(lane.engine.child.pid, signal.SIGKILL)

    until(lambda: lane.engine.num_starts == 4)


def test_a_worker_that_may_leave_for_want_of_work_is_not_brought_back(
    config: LaneConfig, start: Start
) -> None:
    lane = start(replace(config, worker_argv=("sleep", "0.2"), may_idle_out=True))

    until(lambda: lane.worker.state is State.ENDED)
    assert lane.worker.num_starts == 1


def test_a_worker_that_leaves_unasked_is_brought_back(config: LaneConfig, start: Start) -> None:
    lane = start(replace(config, worker_argv=("true",)))

    until(lambda: lane.worker.state is State.GIVEN_UP)
    assert lane.worker.num_starts == QUICK.max_failures


def test_a_worker_waits_for_redis_and_s3_and_loses_no_chance(
    config: LaneConfig, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "WAIT_S", 0.02)
    outage = [QueueUnavailable("Redis is away")] * (2 * QUICK.max_failures)

    def check_services() -> None:
        if outage:
            raise outage.pop()

    lane = start(replace(config, check_services=check_services))

    until(lambda: serves(lane.worker))
    assert (lane.worker.num_starts, lane.worker.why) == (1, "")


def test_settings_that_the_engine_did_not_take_are_told(
    config: LaneConfig, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engine" / "mode").write_text("fewer")

    lane = start(config)

    until(lambda: serves(lane.engine))
    assert "--max-running-requests was asked to be 48 and is 3" in caplog.text
