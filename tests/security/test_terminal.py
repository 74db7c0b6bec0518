"""What comes from elsewhere moves no cursor and forges no line, on a terminal or in a log."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_workers.contract.printable import printable
from dflash_workers.logs import FORMAT, OneLine

ROOT = Path(__file__).parents[2]
FORGED = "2026-11-30 00:00:00,000 ERROR forged: this worker is mine"
HOSTILE = f"a\x1b[2J\x1b]0;title\x07\n{FORGED}\r\x9b31m\u202eb"


def test_what_can_not_be_seen_is_escaped_and_the_rest_stays() -> None:
    assert printable("Grüße\t1\n\x1b[2J\u202e") == "Grüße\t1\n\\x1b[2J\\u202e"


def test_a_logged_text_begins_no_line() -> None:
    record = logging.LogRecord("engine", logging.INFO, "", 0, "it said %s", (HOSTILE,), None)

    lines = OneLine(FORMAT).format(record).split("\n")

    assert [line for line in lines if line.startswith(FORGED)] == []
    assert "\x1b" not in "".join(lines)


def test_an_errors_text_in_a_traceback_begins_no_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("w", logging.ERROR, "", 0, "unexpected", (), sys.exc_info())

    text = OneLine(FORMAT).format(record)

    assert not any(line.startswith(FORGED) for line in text.split("\n"))
    assert "\x1b" not in text
    assert "Traceback" in text


@pytest.mark.slow
def test_the_name_of_a_file_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "bad\x1b[2Jname.jsonl"
    path.write_text(json.dumps({"prompt": ""}) + "\n")

    done = subprocess.run(
        [sys.executable, "-m", "fleet", "enqueue", "--dry-run", str(path)],
        cwd=ROOT,
        capture_output=True,
    )

    assert b"bad\\x1b[2Jname.jsonl" in done.stderr
    assert b"\x1b" not in done.stderr + done.stdout
