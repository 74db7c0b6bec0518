"""Whether the engine died: by what is seen when requests fail, and by what comes back.

Asked by engine when a request broke off (`died`), and by gate before an engine is admitted
(`look`). One that can't be reached is gone. One that can may be another process, and then the one
before it died, however soon its successor was there. One that could not be reached and then is the
process that it was never died: its connection was cut (`was_cut`), and no prompt is to blame.
"""

from __future__ import annotations

import asyncio
import time

from dflash_workers.attempt import Progress
from dflash_workers.contract.errors import EngineUnavailable
from dflash_workers.lives import Lives
from dflash_workers.pace import Patience
from dflash_workers.wire import Wire, is_broken

REPLACED = "its process was replaced by another"
_PROBES = 4  # of a connection that breaks: a dying server may still accept for a moment
_BETWEEN_PROBES_S = 0.25


class Deaths:
    """One engine's. Made and used inside one event loop."""

    def __init__(
        self, wire: Wire, health_path: str, patience: Patience, progress: Progress
    ) -> None:
        self.num = 0  # seen; after one, another engine may stand behind the URL
        self._wire = wire
        self._health_path = health_path
        self._patience = patience
        self._progress = progress
        self._lives = Lives(wire)
        self.evidence = ""  # of the last
        self._is_dead = False  # until it answers again
        self._noted = 0  # the death of the life that `_lives` knows; 0: it lives
        self._is_unreached = False  # all that speaks for that death
        self._cuts: set[int] = set()
        self._alive_s = 0.0  # when it was last seen alive
        self._looking = asyncio.Lock()

    async def died(self, seen: str = "") -> str | None:
        """Evidence that the engine died or is stuck, remembered until it answers again.

        None: it lives, or nobody can tell. Many may ask at once: one of them looks. `seen`: what
        the caller saw of it, which is enough.
        """
        asked_s = time.monotonic()
        async with self._looking:
            if not self._is_dead and self._alive_s < asked_s:
                looked_s = time.monotonic()
                if evidence := seen or self._progress.stuck:
                    self._note(evidence, is_unreached=False)
                elif unreached := await self._probe():
                    self._note(unreached, is_unreached=True)
                else:
                    await self._compare()
                    self._alive_s = looked_s
            return self.evidence if self._is_dead else None

    async def look(self) -> None:
        """At an engine that answers: whether it is the process that it was."""
        async with self._looking:
            await self._compare()

    def note_reply(self) -> None:
        """It answers."""
        self._is_dead = False

    def was_cut(self, number: int) -> bool:
        """Whether the death of this number was none. To be asked once the engine is looked at."""
        return number in self._cuts

    async def _compare(self) -> None:
        is_another = await self._lives.is_another()
        if is_another and not self._noted:
            self._note(REPLACED, is_unreached=False)
        elif is_another is False and self._noted and self._is_unreached:
            self._cuts.add(self._noted)
        if is_another is not None:
            self._noted = 0

    def _note(self, evidence: str, *, is_unreached: bool) -> None:
        self.num += 1
        self.evidence, self._is_dead = evidence, True
        self._noted, self._is_unreached = self.num, is_unreached

    async def _probe(self) -> str | None:
        for _ in range(_PROBES):
            try:
                await self._wire.call(self._health_path, self._patience.health_s)
                return None
            except EngineUnavailable as error:
                evidence, has_answered = f"{error}", not is_broken(error)
            if has_answered:
                break
            await asyncio.sleep(_BETWEEN_PROBES_S)
        # A probe is a real request, and may fail under a long prefill: alone it says nothing.
        silent_s = time.monotonic() - self._progress.at_s
        is_silent = self._progress.num_running > 0 and silent_s >= self._patience.request_s
        return evidence if is_silent or not has_answered else None
