"""machine.py: a node from its start to whatever ends it.

The first tests run the node's main loop in this process, its engine and workers being stand-ins
that are real processes. The slow ones are `dflash-fleet node` with the real worker, Redis and S3;
they share one folder and stand in the order in which a person would meet them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.queues import open_redis
from dflash_workers.contract.serving import PROMOTE, ServingLog
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import free_ports
from dflash_workers.node import following, kept, machine
from dflash_workers.node.folder import NodeFolder
from dflash_workers.node.kept import Limits
from dflash_workers.node.lane import LaneConfig
from dflash_workers.node.machine import SIGNALS, Node
from dflash_workers.server import EngineConfig
from tests.dflash_workers.node import engine_stand_in
from tests.dflash_workers.node.conftest import NodeProcesses, until

# Leaves by itself once the file is there, as a worker that sees a notice; tells of signals.
WORKER = """
import signal, sys, time
from pathlib import Path
notice, log = map(Path, sys.argv[1:])
def told(number, frame):
    log.write_text("told")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
log.write_text("up")
while not notice.exists():
    time.sleep(0.02)
log.write_text("saw it")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept, "TICK_S", 0.05)
    monkeypatch.setattr(machine, "LOOK_EVERY_S", 0.05)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path, redis_settings: Settings) -> Iterator[MakeNode]:
    """One of two lanes; `mode` is the engines'."""
    folder = NodeFolder(tmp_path / "state")
    folder.make()

    def make(
        mode: str = "ok",
        settings: Settings = redis_settings,
        change: Callable[[LaneConfig], LaneConfig] = lambda config: config,
    ) -> Node:
        python = engine_stand_in.make(tmp_path / "engine", mode)
        lanes = [
            LaneConfig(
                number=number,
                slot=f"{settings.slot}-{number}",
                engine=EngineConfig(python, tmp_path, port),
                worker_argv=(
                    *(sys.executable, "-c", WORKER),
                    *(settings.spot_file or "never", str(tmp_path / f"worker-{number}")),
                ),
                worker_environ=dict(os.environ),
                logs=folder.logs,
                limits=Limits(max_failures=2, backoff_s=0.05, ready_s=30),
            )
            for number, port in enumerate(free_ports(2))
        ]
        return Node(list(map(change, lanes)), settings, folder)

    yield make


def once(holds: Callable[[], object], then: Callable[[], object]) -> None:
    """In a thread, while the node runs in this one."""

    def wait() -> None:
        until(holds)
        then()

    threading.Thread(target=wait, daemon=True).start()


def worker_words(folder: Path) -> list[str]:
    logs = [folder / f"worker-{number}" for number in (0, 1)]
    return [log.read_text() for log in logs if log.exists()]


def test_a_signal_drains_workers_first_and_leaves_nothing(
    make_node: MakeNode, tmp_path: Path
) -> None:
    node = make_node()
    once(
        lambda: worker_words(tmp_path) == ["up", "up"], lambda: os.kill(os.getpid(), signal.SIGTERM)
    )

    assert node.run() == 0

    assert worker_words(tmp_path) == ["told", "told"]
    assert not any(process.is_running for lane in node.lanes for process in lane.processes)
    facts = orjson.loads((tmp_path / "state" / "node.json").read_bytes())
    assert (facts["state"], facts["why"]) == ("stopped", "told by SIGTERM")


def test_workers_that_see_a_spot_notice_themselves_are_not_told_a_second_time(
    make_node: MakeNode, redis_settings: Settings, tmp_path: Path
) -> None:
    notice = tmp_path / "going"
    node = make_node(settings=replace(redis_settings, spot_file=str(notice)))
    once(lambda: worker_words(tmp_path) == ["up", "up"], notice.touch)

    assert node.run() == 0

    assert worker_words(tmp_path) == ["saw it", "saw it"]


def test_a_lane_that_is_given_up_ends_the_node_loudly(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_node("oom").run() == 1

    assert "CUDA out of memory" in caplog.text
    assert "this node is given up: engine-" in caplog.text


def test_a_line_a_minute_says_what_every_lane_does(
    make_node: MakeNode,
    redis_settings: Settings,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "SAY_EVERY_S", 0.2)
    caplog.set_level("INFO")
    node = make_node()
    beat: dict[Any, Any] = {"state": "up", "in_flight": "4", "tokens_per_s": "90.0"}
    key = f"{redis_settings.redis_prefix}worker:{redis_settings.slot}-0"
    redis_client.hset(key, mapping=beat)
    line = "engine-0 serving, worker-0 serving (up, 4 in flight, 90.0 tokens/s); engine-1"
    once(lambda: line in caplog.text, lambda: node.leave("seen"))

    assert node.run() == 0

    assert line in caplog.text


def test_a_promoted_drafter_takes_each_lane_in_turn_and_no_failure_is_counted(
    make_node: MakeNode, settings: Settings, store: Store, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.05)
    log = ServingLog(store, settings.run)

    def following_one(config: LaneConfig) -> LaneConfig:
        def engine_with(drafter: str) -> EngineConfig:
            flags = ("--speculative-draft-model-path", drafter) if drafter else ()
            return replace(config.engine, extra_args=flags)

        return replace(config, engine_with=engine_with)

    node = make_node(settings=settings, change=following_one)

    def serves(drafter: str) -> bool:
        return all(
            lane.drafting and lane.drafting.is_ready and lane.drafting.serving == drafter
            for lane in node.lanes
        ) and all(lane.worker.state == "serving" for lane in node.lanes)

    def promote() -> None:
        log.append(log.last(), PROMOTE, "fast", by="test")
        until(lambda: serves("fast"), 60)
        node.leave("seen")

    # Both workers' heartbeats: without them a worker is never ready.
    with open_redis(settings) as client:
        for lane in node.lanes:
            key = f"{settings.redis_prefix}worker:{lane.config.slot}"
            client.hset(key, items=["state", "up", "in_flight", "0", "tokens_per_s", "0"])
    once(lambda: serves(""), promote)

    assert node.run() == 0

    starts = [
        orjson.loads(line)["argv"]
        for line in (tmp_path / "engine" / "starts").read_text().splitlines()
    ]
    assert [argv[-1] == "fast" for argv in starts] == [False, False, True, True]
    assert worker_words(tmp_path) == ["told", "told"]
    assert all(kept.why == "" for lane in node.lanes for kept in lane.processes)
    assert [lane.worker.num_starts for lane in node.lanes] == [2, 2]


def test_two_nodes_over_one_folder_are_refused(tmp_path: Path) -> None:
    first, second = NodeFolder(tmp_path), NodeFolder(tmp_path)

    with first.held():
        assert second.is_alive()
        with pytest.raises(BadInput, match="a node runs here already"), second.held():
            pass

    assert not second.is_alive()


@pytest.mark.slow
def test_a_detached_node_works_on_after_the_command_that_started_it(
    node_processes: NodeProcesses,
) -> None:
    message, *_ = node_processes.plan("tokens=5", "tokens=6")

    done = node_processes.start("--detach", *node_processes.flags())
    said = node_processes.said(done)

    assert done.returncode == 0, said
    assert "it serves" in said
    until(lambda: node_processes.is_committed(message))
    status = node_processes.call("status", "--json")
    assert status.exit_code == 0
    facts = orjson.loads(status.stdout)
    assert (facts["state"], len(facts["lanes"])) == ("serving", 1)
    assert facts["lanes"][0]["worker"]["heartbeat"]["state"] == "up"


@pytest.mark.slow
def test_leave_check_names_a_node_that_runs_and_its_logs(node_processes: NodeProcesses) -> None:
    checked = node_processes.call("leave", "--check", "--json")

    assert checked.exit_code == 3
    held = orjson.loads(checked.stdout)["held"]
    assert {each["what"] for each in held} == {"process", "logs"}


@pytest.mark.slow
def test_a_node_that_left_holds_nothing_and_its_logs_stand_in_s3(
    node_processes: NodeProcesses,
) -> None:
    left = node_processes.call("leave")

    assert left.exit_code == 0, left.output
    assert node_processes.facts()["state"] == "stopped"
    assert node_processes.processes() == []
    worker_log = (node_processes.state / "logs" / "worker-0.log").read_text()
    assert "committed" in worker_log
    assert node_processes.call("leave", "--check").exit_code == 0


@pytest.mark.slow
def test_kill_9_of_a_node_leaves_no_process(node_processes: NodeProcesses) -> None:
    with node_processes.start() as node:
        until(lambda: node_processes.is_serving(node))
        assert len(node_processes.processes()) >= 5  # node, two guardians, engine, worker

        node.kill()
        node.communicate()

    until(lambda: not node_processes.processes(), 30)
    status = node_processes.call("status")
    assert (status.exit_code, "dead" in status.output) == (3, True)
