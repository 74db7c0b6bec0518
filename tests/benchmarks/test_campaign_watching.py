"""What a campaign sees of its processes, against processes that do what is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from benchmarks.campaign.watching import (
    Trace,
    Watch,
    Watched,
    redis_memory_mb,
    slope_per_min,
    worst_slope,
)

# Takes 64 MB and half a second of CPU time, says so, and waits to be ended.
_PROGRAM = """
import sys, time
taken = bytearray(64_000_000)
for at in range(0, len(taken), 4096):
    taken[at] = 1
while time.process_time() < 0.5:
    pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], float]]:
    """The program, and what it says that it has used."""
    argv = [sys.executable, "-c", _PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        yield process, float(process.stdout.readline())


def test_a_trace_keeps_a_bounded_number_of_points_evenly_spread() -> None:
    trace = Trace(capacity=64)

    for number in range(10_000):
        trace.add(float(number), float(number % 1000))

    steps = {b - a for a, b in zip(trace.at_s, trace.at_s[1:], strict=False)}
    assert len(steps) == 1
    assert 32 <= len(trace.at_s) < 64
    assert trace.at_s[0] == 0 and trace.at_s[-1] > 9_700
    assert trace.peak == 999
    assert list(trace.values) == [at % 1000 for at in trace.at_s]


def test_a_slope_is_what_grows_after_the_start() -> None:
    times_s = [float(second) for second in range(0, 600, 2)]
    settles = [500.0 * min(t / 60, 1.0) for t in times_s]  # all of it in the first tenth

    grows = [value + 3.0 * t / 60 for t, value in zip(times_s, settles, strict=True)]

    assert slope_per_min(times_s, settles) == pytest.approx(0.0, abs=1e-9)
    assert slope_per_min(times_s, grows) == pytest.approx(3.0)


def test_too_little_time_has_no_slope() -> None:
    assert slope_per_min([], []) is None
    assert slope_per_min([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]) is None


def test_a_process_memory_and_cpu_time_are_seen_and_kept_after_its_end() -> None:
    with running() as (process, used_s):
        watched = Watched("w0", "worker", process.pid)
        watched.look(0.0)
        process.kill()
        process.wait()
        watched.look(1.0)

    seen = watched.seen(zero_s=0.0)

    assert seen.cpu_s >= used_s - 0.02  # clock ticks
    assert 64 < seen.rss.value[0] < 200
    assert seen.rss.t_s == [0.0]
    assert seen.slope_mb_per_min is None


def test_one_that_nobody_has_waited_for_yet_adds_no_memory() -> None:
    with running() as (process, _used_s):
        watched = Watched("w0", "worker", process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and left as it is
        watched.look(0.0)

    assert len(watched.rss_mb.at_s) == 0


def test_a_watch_samples_by_itself_and_sums_by_kind() -> None:
    with running() as (first, used_s), running() as (second, _), Watch(every_s=0.02) as watch:
        watch.process("w0", "worker", first.pid)
        watch.process("w1", "worker", second.pid)
        watch.process("redis", "redis", os.getpid())
        watch.gauge("answer", "1", lambda: 42.0)
        watch.gauge("nobody knows", "1", lambda: None)
        until = time.monotonic() + 30
        while len(watch.watched[0].rss_mb.at_s) < 4 and time.monotonic() < until:
            time.sleep(0.02)

    stages = {stage.kind: stage for stage in watch.stages(num_prompts=100)}
    series = {one.name: one for one in watch.series()}
    assert set(stages) == {"worker", "redis"}
    assert stages["worker"].cpu_s >= 2 * (used_s - 0.02)
    assert stages["worker"].cpu_ms_per_prompt == pytest.approx(10 * stages["worker"].cpu_s, rel=0.1)
    assert set(series["answer"].value) == {42.0}
    assert series["nobody knows"].value == []
    assert series["cpu.worker"].t_s == series["cpu.redis"].t_s  # so that they can be added up
    assert [one.name for one in watch.processes()] == ["w0", "w1", "redis"]


def test_the_worst_slope_is_of_the_process_that_grows_fastest() -> None:
    grown = {}
    for name, mb_per_min in (("flat", 0.0), ("leaks", 2.0), ("brief", 50.0)):
        grown[name] = Watched(name, "worker", os.getpid())
        for second in range(0, 10 if name == "brief" else 600, 2):
            grown[name].rss_mb.add(float(second), 100 + mb_per_min * second / 60)

    worst = worst_slope(one.seen(0.0) for one in grown.values())

    assert worst is not None and worst.name == "leaks"
    assert worst.slope_mb_per_min == pytest.approx(2.0)


def test_redis_memory_is_unknown_while_it_is_away(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    nowhere = redis.Redis(unix_socket_path=str(tmp_path / "none"))

    here = redis_memory_mb(redis_client, "here")

    assert here is not None and 0 < here < 100
    assert redis_memory_mb(nowhere, "nowhere") is None


def test_what_a_process_took_to_start_is_no_cost_of_a_prompt() -> None:
    watch = Watch()
    watch.process("w0", "worker", os.getpid())
    before_s = watch.cpu_s()["worker"]

    watch.begin(100)
    watch.look()
    (stage,) = watch.stages(200)

    assert before_s > 0.1 and stage.cpu_s >= round(before_s, 2)
    assert stage.cpu_ms_per_prompt < 1000 * before_s / 200
