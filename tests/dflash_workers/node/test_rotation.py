"""rotation.py: a log that somebody writes to is emptied in place."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dflash_workers.launcher import spawn
from dflash_workers.node.rotation import rotate
from tests.dflash_workers.node.conftest import until


def test_a_writer_goes_on_in_the_same_file_and_no_line_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "for n in 1 2 3 4; do echo line $n; while [ ! -e $n ]; do sleep 0.01; done; done"

    def is_written(number: int) -> bool:
        return f"line {number}" in log.read_text()

    with spawn(["sh", "-c", script], name="writer", log_path=log, cwd=tmp_path) as writer:
        for number in (1, 2, 3):
            until(partial(is_written, number))
            assert rotate(log, max_bytes=1, num_kept=2)
            (tmp_path / str(number)).touch()
        until(partial(is_written, 4))

        assert writer.tail() == "line 4"
        (tmp_path / "4").touch()

    assert (tmp_path / "log.1").read_text() == "line 3\n"
    assert (tmp_path / "log.2").read_text() == "line 2\n"
    assert not (tmp_path / "log.3").exists()


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("few words")

    assert not rotate(tmp_path / "log", max_bytes=100)
    assert not rotate(tmp_path / "none", max_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
