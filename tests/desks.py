"""A desk where prompts are rolled out over the fake engine, without Celery, claims or S3.

Each call is another holder of the same batch: it shares nothing with those before but Redis.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_workers.answering import Desk
from dflash_workers.claims import Claim
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage, Prompt, Row, RunSpec
from dflash_workers.engine import Engine
from dflash_workers.journal import Journal, Journals
from dflash_workers.pace import Patience
from dflash_workers.reading import Reader
from dflash_workers.rollout import roll_out

PATIENCE = Patience(away_s=0.2, backoff_s=0.05)


@dataclass
class Holders:
    """Holders of one batch, one after the other."""

    url: str
    chat: Chat
    spec: RunSpec
    hints: Hints
    batch: str = "b"
    max_in_flight: int = 4
    note_every: int = 0
    dialect: str = "sglang"
    counts: Counter[str] = field(default_factory=Counter)  # of the last holder

    def journal(self) -> Journal:
        """Its notes, read anew."""
        journals = Journals(self.hints.redis, self.hints.keys, self.hints.where)
        journal = journals.open(Claim(BatchMessage(self.spec.run, 0, self.batch), "a"))
        journal.load()
        return journal

    def roll(self, prompt: Prompt) -> Row:
        """One prompt, to its end."""
        (fate,) = self.roll_all([prompt])
        if isinstance(fate, BaseException):
            raise fate
        return fate

    def roll_all(
        self, prompts: list[Prompt], leave_when: Callable[[], bool] = lambda: False
    ) -> list[Row | BaseException]:
        """All at once; the holder says goodbye when `leave_when` holds."""
        journal = self.journal()

        async def work() -> list[Row | BaseException]:
            engine = Engine(self.url, self.max_in_flight, PATIENCE, dialect=self.dialect)
            desk = Desk(self.spec, Reader(self.chat), engine, journal, note_every=self.note_every)
            self.counts = desk.counts
            goodbye = asyncio.create_task(_leave_when(leave_when, desk.leaving))
            try:
                work = (roll_out(prompt, desk) for prompt in prompts)
                return await asyncio.gather(*work, return_exceptions=True)
            finally:
                goodbye.cancel()
                await engine.close()

        return asyncio.run(work())


async def _leave_when(holds: Callable[[], bool], leaving: asyncio.Event) -> None:
    while not holds():
        await asyncio.sleep(0.005)
    leaving.set()
