"""Whether this worker takes work now, and whether its engine is known to be the run's.

Asked by tasks before each claim (`why_closed`) and by rounds before each round (`admit`); fed with
every outcome, of the engine's requests, S3, Redis and the disk. Closed means: no new claims; what
runs goes on. It is opened again by itself: a thread of the worker's asks whatever failed (`mend`).
After each death of an engine another may stand behind its URL, so nothing is asked of it before
the canary has answered as the run's first engine did.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_workers.breaker import Breaker, Kind, has_room
from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    EngineUnavailable,
    FleetError,
    Transient,
)
from dflash_workers.engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.5  # shorter than any engine's restart
REFUSED_AGAIN_S = 30.0  # until an engine that was refused is looked at once more
_MIN_FREE_BYTES = 256 << 20  # for logs and the temporary files of libraries: nothing is spooled


@dataclass(frozen=True, slots=True)
class Checks:
    """How it is found out whether something works again. All raise FleetErrors."""

    run: str  # the worker's own
    away_s: float  # an engine that died is waited for so long
    engine: Callable[[str], Awaitable[None]]  # for a run; BadInput: it is another model
    store: Callable[[], None]
    redis: Callable[[], None]
    folder: Path = Path()  # whose disk must have room


class Gate:
    """`admit`, `note_death`, `note_stuck` and `telling_of_deaths` belong into the engine's loop,
    `mend` to one thread, the rest to any.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, checks: Checks, breaker: Breaker
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._checks = checks
        self._breaker = breaker
        self._refusal = ("", "")  # run, and why the engine behind the URL is not its engine
        self._refused_s = 0.0
        self._admitted: set[str] = set()  # runs, whose engine it was
        self._num_deaths = engine.num_deaths  # when it was looked at
        self._num_told = engine.num_deaths
        self._was_away = False  # since then, with nothing in it
        self._admitting = asyncio.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self._said: str | None = None
        engine.on_outcome = lambda ok: self.record("engine", ok)

    @property
    def has_died(self) -> bool:
        """Whether the engine was seen to die since it was looked at."""
        return self._engine.num_deaths != self._num_deaths

    def why_closed(self) -> str | None:
        """For people; None while it is open. The same text until the reason changes."""
        _run, refusal = self._refusal
        if refusal:
            return refusal
        if self.has_died or self._was_away:
            return "engine: it is gone, and not back yet"
        return self._breaker.why_open()

    def wait_open(self, stop: threading.Event) -> None:
        """Until it is, or until `stop` is set."""
        while self.why_closed() and not stop.wait(POLL_S):
            pass

    def record(self, kind: Kind, ok: bool) -> None:
        """The outcome of an attempt."""
        self._breaker.record(kind, ok, time.monotonic())

    @contextmanager
    def recording(self, kind: Kind) -> Iterator[None]:
        """Around calls of one kind. A refusal that is about the thing asked for is an answer."""
        try:
            yield
        except (Transient, AccessDenied):
            self.record(kind, False)
            raise
        except FleetError:
            self.record(kind, True)
            raise
        self.record(kind, True)

    def is_admitted(self, run: str) -> bool:
        """Whether the engine is known to be this run's. Costs nothing."""
        return run in self._admitted and not self.has_died and not self._was_away

    async def admit(self, run: str) -> None:
        """Until the engine answers, and as the run's first one did, whatever its /health says.

        Raises EngineUnavailable once patience is over; BadInput for another model: the gate is
        closed then, and looks again every REFUSED_AGAIN_S.
        """
        async with self._admitting:
            if self.is_admitted(run):
                return
            await self._engine.wait_until_there(self._checks.away_s)
            await self._engine.look()
            self.note_death(self._engine.last_death)  # which nobody saw, perhaps, before this look
            num_deaths = self._engine.num_deaths
            try:
                await self._check_engine(run)
            except BadInput:
                self._note_looked(num_deaths)
                raise
            self._note_looked(num_deaths)
            if self.has_died:
                raise EngineUnavailable("the engine died while it was looked at")
            self._admitted.add(run)

    @contextmanager
    def telling_of_deaths(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Have the listener called with what was seen, at each death, inside the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def note_death(self, evidence: str) -> None:
        """The engine was seen to die: every listener is told, once per death."""
        if self._num_told == self._engine.num_deaths:
            return
        self._num_told = self._engine.num_deaths
        log.warning("%s", evidence)
        for listener in list(self._listeners):
            listener(evidence)

    async def note_stuck(self, evidence: str) -> None:
        """The engine answers nothing any more, which counts as its death."""
        if await self._engine.died(evidence):
            self.note_death(evidence)

    def mend(self) -> None:
        """One look, due every POLL_S or so: try what failed once its pause is over; say what
        changed. Each attempt's outcome opens the gate, or keeps it closed for longer.
        """
        self.record("disk", has_room(self._checks.folder, _MIN_FREE_BYTES))
        self._say()
        refused_run, _refusal = self._refusal
        is_due = time.monotonic() - self._refused_s >= REFUSED_AGAIN_S
        if self.has_died or self._was_away or (refused_run and is_due):
            self._try_to_admit(refused_run or self._checks.run)
        elif self._breaker.why_open() and self._breaker.lets_through(time.monotonic()):
            self._try_everything()
        elif self._engine.num_running == 0:
            self._do(self._look_at_idle_engine())
        self._say()

    def _try_to_admit(self, run: str) -> None:
        with suppress(FleetError):  # said by `why_closed`
            self._do(self.admit(run))

    def _try_everything(self) -> None:
        attempts: list[tuple[Kind, Callable[[], None]]] = [
            ("engine", lambda: self._do(self._check_engine(self._checks.run))),
            ("store", self._checks.store),
            ("redis", self._checks.redis),
        ]
        for kind, attempt in attempts:
            with suppress(FleetError), self.recording(kind):
                attempt()

    async def _look_at_idle_engine(self) -> None:
        """One that goes with nothing in it is missed by nobody, and may come back as another."""
        if not await self._engine.is_listening():
            self._was_away = True

    async def _check_engine(self, run: str) -> None:
        try:
            await self._checks.engine(run)
        except BadInput as error:
            self._refusal, self._refused_s = (run, f"{error}"), time.monotonic()
            raise
        self._refusal = ("", "")

    def _note_looked(self, num_deaths: int) -> None:
        if self._num_deaths != num_deaths or self._was_away:
            self._admitted.clear()
        self._num_deaths, self._was_away = num_deaths, False

    def _do(self, work: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _say(self) -> None:
        why = self.why_closed()
        if why == self._said:
            return
        self._said = why
        if why:
            log.warning("takes no work: %s", why)
        else:
            log.info("takes work again")
