"""Rows that are made to break a reader: each is refused by name or mended, in little memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from fleet import app

ROOT = Path(__file__).parents[2]
DEEP = 100_000  # levels
HUGE_BYTES = 100 << 20
MAX_RSS_MB = 400

REFUSED = {
    "malformed_json": [
        f'{{"prompt": "x", "a": {"[" * DEEP}{"]" * DEEP}}}',
        "{" * DEEP,
        f'{{"id": {"9" * DEEP}, "prompt": "x"}}',
    ],
    "bad_tools": [json.dumps({"prompt": "x", "tools": "[" * DEEP})],
    "unsupported_value": [json.dumps({"prompt": "x", "n": 1 << 70})],
    "no_messages": ['{"prompt": 1e999999}'],
}
TAKEN = {
    "nul": json.dumps({"id": "nul", "prompt": "a\0b"}),
    "wide": json.dumps({"id": "wide", "prompt": "x", **{str(i): i for i in range(10_000)}}),
    "../../etc/passwd": json.dumps({"id": "../../etc/passwd", "prompt": "x"}),
    "a\nb": json.dumps({"id": "a\nb", "prompt": "x"}),
}


def test_a_bomb_is_refused_by_name_and_the_rows_around_it_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bombs = [bomb for bombs in REFUSED.values() for bomb in bombs]
    path.write_text("\n".join([*TAKEN.values(), *bombs, '{"prompt": "last"}']) + "\n")

    result = CliRunner().invoke(app, ["enqueue", "--dry-run", "--json", str(path)])

    assert result.exit_code == 3, result.output
    facts = orjson.loads(result.stdout)
    assert facts["refused"] == {reason: len(rows) for reason, rows in REFUSED.items()}
    assert facts["num_planned"] == len(TAKEN) + 1


@pytest.mark.slow
def test_a_row_of_a_hundred_mebibytes_is_refused_in_little_memory() -> None:
    program = (
        "import sys, fleet\n"
        "sys.argv = ['dflash-fleet', 'enqueue', '--dry-run', '-']\n"
        "try:\n"
        "    fleet.main()\n"
        "finally:\n"
        "    print(open('/proc/self/status').read())\n"
    )
    rows = b'{"prompt": "' + b"a" * HUGE_BYTES + b'"}\n'

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, input=rows, capture_output=True
    )

    assert done.returncode == 1
    assert b"a line of over 64 MiB: no row" in done.stderr
    peak = re.search(rb"VmHWM:\s+(\d+) kB", done.stdout)
    assert peak and int(peak[1]) < MAX_RSS_MB << 10
