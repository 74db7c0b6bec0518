"""A batch's prompts in the engine, round by round, until each has its fate.

Made by generate, runs in the engine's loop, asks rollout for each prompt. A round ends when all its
prompts have ended, or when an engine died: those that were in it are blamed, and a new round begins
once it is back and known to be the run's. Suspects run alone, after all others; who was condemned
is rejected with the evidence. Who leaves (`close`, `leave`) ends the last round early, with all
that was sampled noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from dflash_workers.answering import Desk
from dflash_workers.contract.errors import Draining, EngineUnavailable, PromptRejected
from dflash_workers.contract.records import Prompt, Rejection, Row
from dflash_workers.gate import Gate
from dflash_workers.poison import Case, schedule
from dflash_workers.rollout import roll_out
from dflash_workers.seats import Seats, every_slot

POISON = "poison"

Fate = Row | Rejection


class Rounds:
    """One batch's. Made anywhere; everything else inside the engine's loop."""

    def __init__(
        self, prompts: Sequence[Prompt], desk: Desk, case: Case, gate: Gate, num_slots: int
    ) -> None:
        self._prompts = prompts
        self._desk = desk  # of the round that runs
        self._case = case
        self._gate = gate
        self._num_slots = num_slots  # of the engine, over all batches
        self._fates: dict[str, Fate] = {}
        self._alone_key = ""  # who runs alone, as the case knows it
        self._fallen: set[str] = set()  # were in the engine when it died
        self._death = ""  # what was seen of it; empty: the engine lives, as far as we know
        self._is_closed = False

    async def fates(self) -> list[Fate]:
        """Every prompt's, in their order.

        Raises Draining after `close` or `leave`, and what the engine can't do: both with everything
        that ended noted. One prompt that fails so leaves the others of its round to end.
        """
        with self._gate.telling_of_deaths(self._engine_died):
            while left := [p for p in self._prompts if p.key not in self._fates]:
                self._check_open()
                await self._gate.admit(self._desk.spec.run)
                await self._next_round(left)
        return [self._fates[prompt.key] for prompt in self._prompts]

    def close(self) -> None:
        """Start nothing new: what is in the engine may end."""
        self._is_closed = True
        self._desk.seats.close()

    def leave(self) -> None:
        """Start nothing new, and end what runs, with what was sampled noted."""
        self.close()
        self._desk.leaving.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Draining("nothing new is started")

    async def _next_round(self, left: list[Prompt]) -> None:
        plan = schedule(left, self._case.history)
        for prompt, evidence in plan.condemned:
            self._fates[prompt.key] = Rejection(prompt.key, prompt.id, POISON, evidence)
        if plan.together:
            await self._note_running("")
            await self._run(plan.together, alone=False)
        elif plan.alone:
            async with every_slot(self._desk.engine.slot, self._num_slots):
                await self._note_running(plan.alone[0].key)
                await self._run(plan.alone[:1], alone=True)

    async def _note_running(self, alone_key: str) -> None:
        if alone_key != self._alone_key:
            await asyncio.to_thread(self._case.note_running, alone_key)
            self._alone_key = alone_key

    async def _run(self, prompts: list[Prompt], *, alone: bool) -> None:
        """One round."""
        self._check_open()
        if self._gate.has_died:  # while this batch waited for its turn
            return
        self._desk = replace(self._desk, leaving=asyncio.Event(), seats=Seats(is_alone=alone))
        self._fallen, self._death = set(), ""
        ended = await asyncio.gather(*map(self._answer, prompts), return_exceptions=True)
        if self._death:
            self._desk.counts["engine_deaths"] += 1
            if blamed := sorted(self._fallen - self._fates.keys()):
                await asyncio.to_thread(self._case.blame, blamed, self._death, alone=alone)
            return
        for error in ended:
            if error is not None:
                raise error

    async def _answer(self, prompt: Prompt) -> None:
        try:
            self._fates[prompt.key] = await roll_out(prompt, self._desk)
        except PromptRejected as error:
            self._fates[prompt.key] = Rejection(prompt.key, prompt.id, error.reason, error.detail)
        except EngineUnavailable as error:
            if not self._gate.has_died:
                raise
            self._fallen.add(prompt.key)
            # At once, without a step of the loop between: who waits for this prompt's seat was not
            # in the engine when it died.
            self._gate.note_death(f"{error}")

    def _engine_died(self, evidence: str) -> None:
        """End the round: what asks again would reach an engine that nobody has looked at yet."""
        self._death = evidence
        self._fallen |= self._desk.seats.taken
        self._desk.seats.close()
        self._desk.leaving.set()
