"""What simulated engines sampled, for whoever asks what was made twice.

Written by engine.py: two JSON lines a request, at its begin and at its end, each in one write to a
file opened for appending, so that a killed process loses no line that was written, and several
processes may share a file. The lines are described in the package's docstring.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


class TokenLog:
    """No path: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, facts: dict[str, Any]) -> None:
        """One line."""
        if self._file >= 0:
            os.write(self._file, orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE))
