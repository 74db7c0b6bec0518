"""A batch's prompts in the engine, round by round, until each has its fate.

Made by generate, runs in the engine's loop, asks rollout for each prompt. A round ends when all its
prompts have ended, or when an engine died: those that were in it are blamed, and a new round begins
once it is back and known to be the run's; had only its connection been cut, they are absolved.
Suspects run alone, after all others; who was condemned is rejected with the evidence. What is noted
already, or can't be asked, needs no engine and waits for none. Who leaves (`close`, `leave`) ends
the last round early, with all that was sampled noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from dflash_workers.answering import Desk
from dflash_workers.contract.errors import Draining, EngineUnavailable, PromptRejected
from dflash_workers.contract.records import Prompt, Rejection, Row
from dflash_workers.gate import Gate
from dflash_workers.poison import Case, Schedule, schedule
from dflash_workers.questions import Leaving
from dflash_workers.rollout import roll_out
from dflash_workers.seats import Seats

POISON = "poison"

Fate = Row | Rejection


class Rounds:
    """One batch's. Made anywhere; everything else inside the engine's loop."""

    def __init__(self, prompts: Sequence[Prompt], desk: Desk, case: Case, gate: Gate) -> None:
        self._prompts = prompts
        self._desk = desk  # of the round that runs
        self._case = case
        self._gate = gate
        self._fates: dict[str, Fate] = {}
        self._alone_key = ""  # who runs alone, as the case knows it
        self._fallen: set[str] = set()  # were in the engine when it died
        self._death = ""  # what was seen of it; empty: the engine lives, as far as we know
        self._num_deaths = 0  # of the engine, with that one
        self._blame: tuple[int, str] | None = None  # for the last one: its number, the note's name
        self._is_closed = False

    async def fates(self) -> list[Fate]:
        """Every prompt's, in their order.

        Raises Draining after `close` or `leave`, and what the engine can't do: both with everything
        that ended noted. One prompt that fails so leaves the others of its round to end.
        """
        with self._gate.telling_of_deaths(self._engine_died):
            while left := self._left():
                self._check_open()
                if not self._gate.is_admitted(self._desk.spec.run):
                    await self._settle(left)
                    if not (left := self._left()):
                        break
                    await self._gate.admit(self._desk.spec.run)
                    await self._absolve()
                await self._next_round(left)
        return [self._fates[prompt.key] for prompt in self._prompts]

    def _left(self) -> list[Prompt]:
        return [prompt for prompt in self._prompts if prompt.key not in self._fates]

    def due_s(self) -> float:
        """When it will have stood still for longer than the limits of its requests allow any of
        them, as time.monotonic() counts. One that waits for its turn in the engine moves as long as
        the engine does. From any thread.
        """
        engine, sampling = self._desk.engine, self._desk.spec.sampling
        moved_s = self._desk.growth.at_s
        if not self._desk.seats.taken:
            moved_s = max(moved_s, engine.grown_at_s)
        overridden = (sampling.overridden(prompt.sampling) for prompt in self._prompts)
        return moved_s + engine.silence_s(max(wanted.max_new_tokens for wanted in overridden))

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

    async def _settle(self, left: list[Prompt]) -> None:
        """Whatever needs no engine."""
        closed = replace(self._desk, seats=Seats())
        closed.seats.close()
        for prompt in left:
            with suppress(Draining):  # it does need one
                self._fates[prompt.key] = await self._fate(prompt, closed)
        self._plan(self._left())

    async def _absolve(self) -> None:
        """Whom we blamed for the last death, where it turned out to be none."""
        if self._blame and self._desk.engine.was_cut(self._blame[0]):
            self._desk.counts.update(engine_deaths=-1, engine_cuts=1)
            await asyncio.to_thread(self._case.absolve, self._blame[1])
        self._blame = None

    def _plan(self, left: list[Prompt]) -> Schedule:
        """Who runs with whom; who was condemned has his fate now."""
        plan = schedule(left, self._case.history)
        for prompt, evidence in plan.condemned:
            self._fates[prompt.key] = Rejection(prompt.key, prompt.id, POISON, evidence)
        return plan

    async def _next_round(self, left: list[Prompt]) -> None:
        plan = self._plan(left)
        if plan.together:
            await self._note_running("")
            await self._run(plan.together, alone=False)
        elif plan.alone:
            async with self._desk.engine.slots.every():
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
        seats = Seats(is_alone=alone, is_first=self._case.is_inherited)
        self._desk = replace(self._desk, leaving=Leaving(), seats=seats)
        self._fallen, self._death = set(), ""
        self._desk.growth.note()
        ended = await asyncio.gather(*map(self._answer, prompts), return_exceptions=True)
        if self._death:
            self._desk.counts["engine_deaths"] += 1
            if blamed := sorted(self._fallen - self._fates.keys()):
                name = await asyncio.to_thread(self._case.blame, blamed, self._death, alone=alone)
                self._blame = self._num_deaths, name
            return
        for error in ended:
            if error is not None:
                raise error

    async def _answer(self, prompt: Prompt) -> None:
        try:
            self._fates[prompt.key] = await self._fate(prompt, self._desk)
        except EngineUnavailable as error:
            if not self._gate.has_died:
                raise
            self._fallen.add(prompt.key)
            # At once, without a step of the loop between: who waits for this prompt's seat was not
            # in the engine when it died.
            self._gate.note_death(f"{error}")

    async def _fate(self, prompt: Prompt, desk: Desk) -> Fate:
        try:
            return await roll_out(prompt, desk)
        except PromptRejected as error:
            return Rejection(prompt.key, prompt.id, error.reason, error.detail)

    def _engine_died(self, evidence: str) -> None:
        """End the round: what asks again would reach an engine that nobody has looked at yet."""
        self._death, self._num_deaths = evidence, self._desk.engine.num_deaths
        self._fallen |= self._desk.seats.taken
        self._desk.seats.close()
        self._desk.leaving.set()
