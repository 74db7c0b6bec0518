"""The workers of one batch, on the real claims, journal and commit, pausing where others may act.

Used by test_claims_interleaved.py, which decides who moves next. A task is a generator that follows
tasks, generate and answering: what lies between two of its pauses happens at once. Renewals and
prompts go on beside it, as in holds and rollout. What is answered is held against <- claims_book.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from functools import partial

from dflash_workers.claims import Claim, Renewal
from dflash_workers.contract.commit import publish
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import Commit, Prompt
from dflash_workers.journal import Journal, Journals
from tests.dflash_workers.claims_book import ANSWER, Batch, Moves, Pauses, sealed


class Worker:
    """A task and its renewals: what tasks, generate, holds and answering do with a batch."""

    def __init__(self, batch: Batch) -> None:
        hints = batch.campaign.hints
        self._batch = batch
        self._journals = Journals(hints.redis, hints.keys, hints.where, together_s=0)
        self._begin()

    def _begin(self) -> None:
        self._doing = "receives"
        self._is_draining = False
        self._is_unheard = False  # publishing, and got no answer
        self._claim: Claim | None = None  # while it is renewed
        self._journal: Journal | None = None  # while prompts may start
        self._running: set[str] = set()
        self._news: deque[Renewal] = deque()
        self._in_doubt = False
        self._noted_before: set[str] = set()
        self._task = self._take()

    @property
    def attempt(self) -> str:
        """The one whose claim is renewed."""
        return self._claim.attempt if self._claim else ""

    @property
    def is_at_rest(self) -> bool:
        return self._doing == "receives"

    def moves(self, *, has_hint: bool) -> Moves:
        """What it may do next."""
        moves: Moves = {}
        if self._may_go_on(has_hint):
            moves[self._doing] = self.go_on
        if self._claim:
            moves["renews"] = self.renew
        for number, prompt in enumerate(self._batch.prompts):
            if prompt.key in self._running:
                moves[f"notes prompt {number}"] = partial(self._note, prompt)
            elif self._journal and not self._journal.known(prompt.key, 0, ANSWER.input_ids):
                moves[f"starts prompt {number}"] = partial(self._start, prompt)
        return moves

    def faults(self) -> Moves:
        """What may befall it next."""
        faults: Moves = {}
        if self._doing != "receives":
            faults["crashes"] = self._crash
            faults["is to drain"] = self._drain
        if self._claim:
            faults["gets no answer to a renewal"] = partial(self.renew, is_answered=False)
        if self._doing == "publishes":
            faults["gets no answer to its commit"] = partial(self._publish_unheard, is_late=False)
            faults["has its commit held up"] = partial(self._publish_unheard, is_late=True)
        return faults

    def go_on(self) -> None:
        """The task, to its next pause or its end."""
        if next(self._task, "over") == "over":
            self._begin()

    def renew(self, *, is_answered: bool = True) -> None:
        """What the renewing thread does."""
        assert self._claim
        book, attempt = self._batch.book, self._claim.attempt
        found = self._batch.claims.renew(self._claim)
        if found is Renewal.LOST:
            assert book.holder not in ("", attempt)
        else:
            assert book.holder in ("", attempt)
            assert (found is Renewal.HELD) == (book.holder == attempt and not book.is_cleared)
            if not book.holder:
                self._noted_before = set(book.noted)
            book.hold(attempt)
        if not is_answered:
            self._in_doubt = True
        elif found is Renewal.LOST:
            self._news.append(found)
        elif found is Renewal.AGAIN or self._in_doubt:
            self._in_doubt = False
            self._news.append(Renewal.AGAIN)

    def forget_notes(self) -> None:
        """After a flush, what was noted may be made again."""
        self._noted_before.clear()

    def _may_go_on(self, has_hint: bool) -> bool:
        if self._doing == "receives":
            return has_hint
        return self._doing != "works" or bool(self._news or self._is_draining or self._is_done())

    def _is_done(self) -> bool:
        journal, ids = self._journal, ANSWER.input_ids
        assert journal
        return not self._running and all(
            journal.known(prompt.key, 0, ids) for prompt in self._batch.prompts
        )

    def _start(self, prompt: Prompt) -> None:
        """Unless it is noted: looked up once more."""
        assert self._journal
        if not asyncio.run(self._journal.find(prompt.key, 0, ANSWER.input_ids)):
            is_sure = self._doing == "works" and not self._news and not self._in_doubt
            assert not (is_sure and prompt.key in self._noted_before), "noted before its claim"
            self._running.add(prompt.key)

    def _note(self, prompt: Prompt) -> None:
        assert self._journal
        book = self._batch.book
        self._running.remove(prompt.key)
        asyncio.run(self._journal.keep(prompt.key, ANSWER))
        book.noted.add(prompt.key)
        book.has_zombie_row |= book.holder != self.attempt or book.commit is not None

    def _crash(self) -> None:
        self._batch.book.is_hint_lost |= self._doing == "claims"
        self._begin()

    def _drain(self) -> None:
        self._is_draining = True

    def _publish_unheard(self, *, is_late: bool) -> None:
        """The PUT of the commit is done and its reply lost, or it is underway still."""
        assert self._claim
        batch, store = self._batch, self._batch.campaign.store
        commit, body = sealed(self._claim, batch.prompts)
        if is_late:
            store.put_new(commit.data_key, body)
            key = RunKeys(commit.run).commit(commit.segment, commit.batch)
            batch.late_puts.append((key, dump(commit)))
        else:
            assert publish(store, commit, body) == batch.find_commit()
        self._is_unheard = True

    def _take(self) -> Pauses:
        """tasks.take."""
        batch, book = self._batch, self._batch.book
        if not batch.pop_hint():
            return
        yield from self._pause("claims")
        if self._is_draining:
            batch.send_hint()
            return
        claim = batch.claims.claim(batch.message)
        assert (claim is None) == bool(book.holder)
        if claim:
            book.hold(claim.attempt)
            self._noted_before = set(book.noted)
            yield from self._generate(claim)

    def _generate(self, claim: Claim) -> Pauses:
        """generate.generate."""
        self._claim = claim
        then = yield from self._hold(claim)
        self._claim = self._journal = None  # renewed no more
        self._running.clear()
        yield from self._pause(then)
        if then == "clears":
            self._clear(claim)
        elif then == "releases":
            deadline_ms = self._batch.begin("release", claim.attempt)
            assert bool(deadline_ms) == (self._batch.book.holder == claim.attempt)
            if deadline_ms:
                self._batch.book.holder = ""
                self._doing = "hands over"
                yield from self._batch.finish(deadline_ms)

    def _hold(self, claim: Claim) -> Generator[None, None, str]:
        """What goes on while the claim is renewed; returns what is to follow."""
        journal = self._journals.open(claim)
        commit = yield from self._look(journal)
        self._journal = journal
        while not commit and not self._is_done():
            yield from self._pause("works")
            news = self._news.popleft() if self._news else None
            if news is Renewal.LOST:
                return "leaves"
            if self._is_draining:
                return "releases"
            if news is Renewal.AGAIN:
                commit = yield from self._look(journal)
        self._is_unheard = False
        while not commit:
            yield from self._pause("publishes")
            if self._is_unheard and Renewal.LOST in self._news:
                return "leaves"
            if self._is_unheard and self._is_draining:
                return "releases"
            commit = publish(self._batch.campaign.store, *sealed(claim, self._batch.prompts))
            assert commit == self._batch.find_commit()
        return "clears"

    def _look(self, journal: Journal) -> Generator[None, None, Commit | None]:
        """All that is due after a claim, in this order."""
        yield from self._pause("loads")
        self._load(journal)
        yield from self._pause("asks")
        return self._batch.find_commit()

    def _load(self, journal: Journal) -> None:
        """Rows that Redis lost are noted again."""
        batch, book = self._batch, self._batch.book
        hints, keys = batch.campaign.hints, [prompt.key for prompt in batch.prompts]
        noted = hints.redis.hkeys(hints.keys.journal(batch.message.run, batch.name))
        ours = {key for key in keys if journal.known(key, 0, ANSWER.input_ids)}
        lost = {key for key in ours if f"{key}:0".encode() not in noted}
        journal.load()
        book.noted |= lost
        book.has_zombie_row |= bool(lost) and (
            book.holder != self.attempt or book.commit is not None
        )

    def _pause(self, before: str) -> Pauses:
        self._doing = before
        yield

    def _clear(self, claim: Claim) -> None:
        book = self._batch.book
        self._batch.claims.clear(claim)
        book.num_settings += 1
        book.has_zombie_row = False
        if book.holder == claim.attempt:
            book.holder = ""
        book.is_cleared = bool(book.holder)
