"""What a person sees while engines start: each process' state, and the last lines of its log.

Fed by -> machine once a second. On a terminal it is a live display that goes away once everything
serves; elsewhere a line per process that isn't ready, every SAY_EVERY_S.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import TracebackType

from rich.markup import escape
from rich.status import Status

from dflash_workers.contract.terminal import err
from dflash_workers.node.kept import Kept, State

log = logging.getLogger(__name__)

SAY_EVERY_S = 15.0
LINES_SHOWN = 3
_AT_REST = (State.SERVING, State.ENDED, State.WAITING)


class Screen:
    """Use in a `with`."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._said_s = time.monotonic()

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def show(self, processes: Sequence[Kept]) -> None:
        """Those that are on their way."""
        starting = [kept for kept in processes if kept.state not in _AT_REST]
        if not starting:
            return self._close()
        if err.is_terminal:
            self._draw(starting)
        elif time.monotonic() - self._said_s > SAY_EVERY_S:
            self._said_s = time.monotonic()
            for kept in starting:
                log.info("%s: %s", _headline(kept), kept.tail(1))

    def _draw(self, starting: Sequence[Kept]) -> None:
        text = "\n".join(f"{_headline(kept)}\n{escape(_shown(kept))}" for kept in starting)
        if self._status is None:
            self._status = err.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def _close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _headline(kept: Kept) -> str:
    return f"{kept.name} {kept.state}, {time.monotonic() - kept.since_s:.0f} s"


def _shown(kept: Kept) -> str:
    return "\n".join(f"  {line[: err.width - 4]}" for line in kept.tail(LINES_SHOWN).splitlines())
