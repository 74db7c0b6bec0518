"""What a campaign tells people while it runs: lines on stderr, with the time since it began."""

from __future__ import annotations

import sys
import time

_BEGAN_S = time.monotonic()


def say(line: str) -> None:
    """One line, at once."""
    print(f"{time.monotonic() - _BEGAN_S:8.1f} s  {line}", file=sys.stderr, flush=True)
