"""launcher.py and guardian.py: no child outlives us, however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_workers.contract.errors import BadInput, Missing, NotEnough
from dflash_workers.launcher import Child, spawn

TIMEOUT_S = 20.0
# A tree as an engine's: a shell, a child of it, and one that has left the session and its parent.
TREE = "echo up; sleep 300 & setsid sh -c 'sleep 300 & exit' ; wait"
# Our own part in another process, so that it can be killed.
PARENT = f"""
import time
from pathlib import Path
from dflash_workers.launcher import spawn
child = spawn(["sh", "-c", {TREE!r}], name="tree", log_path=Path("tree.log"))
print(child.pid, child.guardian.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Child]:
    """A child with two more processes below it."""
    with spawn(["sh", "-c", TREE], name="tree", log_path=tmp_path / "tree.log") as child:
        _wait_until(lambda: len(_descendants(child.guardian.pid)) == 3)
        yield child


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process that has started a tree; and the guardian and the tree's three processes."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        _, guardian = map(int, process.stdout.readline().split())
        _wait_until(lambda: len(_descendants(guardian)) == 3)
        yield process, [psutil.Process(guardian), *_descendants(guardian)]
        process.kill()


def test_child_and_grandchildren_die_when_the_parent_is_killed(
    parent: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, tree = parent

    process.kill()

    _wait_until(lambda: not any(map(_runs, tree)))


def test_child_dies_when_the_guardian_is_killed(tree: Child) -> None:
    child = psutil.Process(tree.pid)
    orphans = _descendants(tree.guardian.pid)

    tree.guardian.kill()

    _wait_until(lambda: not _runs(child))
    assert tree.poll() == -signal.SIGKILL
    _kill(orphans)


def test_stop_leaves_nothing_of_the_tree(tree: Child) -> None:
    processes = [psutil.Process(tree.guardian.pid), *_descendants(tree.guardian.pid)]

    tree.stop(5)
    tree.stop(5)

    assert not any(map(_runs, processes))


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(300)"
    )
    child = spawn([sys.executable, "-uc", stubborn], name="s", log_path=tmp_path / "log")
    _wait_until(lambda: child.tail() == "up")
    started = time.monotonic()

    child.stop(0.5)

    assert 0.5 <= time.monotonic() - started < 5
    assert child.poll() == -signal.SIGKILL


def test_what_a_dead_child_leaves_behind_is_stopped(tmp_path: Path) -> None:
    with spawn(["sh", "-c", "sleep 300 & echo $!"], name="s", log_path=tmp_path / "log") as child:
        assert child.wait(TIMEOUT_S) == 0

        assert not psutil.pid_exists(int(child.tail()))


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -SEGV $$", -11)])
def test_exit_status_is_passed_on(tmp_path: Path, script: str, status: int) -> None:
    with spawn(["sh", "-c", script], name="s", log_path=tmp_path / "log") as child:
        assert child.wait(TIMEOUT_S) == status


def test_signals_to_the_guardian_do_not_reach_the_child(tree: Child) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        tree.guardian.send_signal(number)
    time.sleep(0.3)

    assert tree.poll() is None
    assert os.getsid(tree.pid) != os.getsid(0)


def test_tail_shows_the_last_lines_of_this_child_only(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    with spawn(["sh", "-c", "echo earlier"], name="s", log_path=log_path) as child:
        child.wait(TIMEOUT_S)

    with spawn(["sh", "-c", "echo a; echo b >&2; echo c"], name="s", log_path=log_path) as child:
        child.wait(TIMEOUT_S)

    assert child.tail() == "a\nb\nc"
    assert child.tail(2) == "b\nc"
    assert log_path.read_text().startswith("earlier\n")


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"thing can't be started: No such file.*: no-such-program"):
        spawn(["no-such-program"], name="thing", log_path=tmp_path / "log")


def test_a_second_child_over_one_log_is_refused_while_the_first_lives(
    tree: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_workers.launcher.LOCK_WAIT_S", 0.3)

    with pytest.raises(BadInput, match="runs already"):
        spawn(["true"], name="tree", log_path=tree.log_path)


def test_waiting_for_a_child_that_goes_on_ends(tree: Child) -> None:
    with pytest.raises(NotEnough, match="still runs"):
        tree.wait(0.1)


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in filter(_runs, processes):
        process.kill()


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
