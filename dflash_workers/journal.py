"""What a batch's holder leaves in Redis for the next one: turns that ended, and those half made.

Written by answering (keep, put), read at each claim (load) and before each turn is started (find).
One hash per batch: `<prompt>:<turn>` holds a finished turn, the first row wins, whoever wrote it;
`<prompt>:<turn>:partial` the whole of an unfinished one, replaced only by a longer one, refused and
removed once the finished row stands. A row counts only for the ids that it was asked with. What all
batches have for Redis goes together (round_trips.py); a turn counts as noted once Redis has said
so. Redis away or full pauses the journal with a warning: rows are kept here, no more than the batch
has turns, and the batch commits without it. Whoever sees Redis back has the batch's holder load,
which writes what is missing there, even what it had before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import redis

from dflash_workers.claims import Claim
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.keys import JOURNAL_S, RedisKeys
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import Answer
from dflash_workers.notes import Ended, Note, Partial, digest_of, pack, rank_of, unpack
from dflash_workers.round_trips import Command, RoundTrips

log = logging.getLogger(__name__)

PAUSE_S = 5.0  # with Redis away, how long no turn waits for it
# A turn that ended waits so long for others, and for the look of the one that takes its place, to
# go with it: its place in the engine is free already.
TOGETHER_S = 0.005
_WRITTEN_AT_ONCE = 64  # notes of some KB each: Redis is away for nobody else meanwhile
_PARTIAL = ":partial"

# KEYS: journal.  ARGV: lifetime (s), then for each note: field of the finished turn, field of the
# partial one, rank, row. Rank 0 is a finished turn; of partials the higher one stays.
# Returns for each finished turn the other row that stands in its place, or "".
_WRITE = """
local others = {}
for i = 2, #ARGV, 4 do
  local field, partial, rank, row = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local other = ''
  if rank == 0 then
    if redis.call('HSETNX', KEYS[1], field, row) == 0 then
      other = redis.call('HGET', KEYS[1], field)
    end
    redis.call('HDEL', KEYS[1], partial)
  elseif redis.call('HEXISTS', KEYS[1], field) == 0 then
    local noted = redis.call('HGET', KEYS[1], partial)
    if not noted or tonumber(string.match(noted, '^%d+') or 0) < rank then
      redis.call('HSET', KEYS[1], partial, row)
    end
  end
  table.insert(others, other ~= row and other or '')
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return others
"""


class Journals:
    """Opens the journal of each batch. `client` should time out in seconds: turns wait for it."""

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        where: str,
        pause_s: float = PAUSE_S,
        together_s: float = TOGETHER_S,
    ) -> None:
        self.redis, self.keys, self.where = client, keys, where
        self.pause_s, self.together_s = pause_s, together_s
        self.trips = RoundTrips(client, where)
        self._paused: set[str] = set()  # attempts

    def open(self, claim: Claim) -> Journal:
        """The journal of a claimed batch."""
        return Journal(self, claim)

    def note_paused(self, attempt: str) -> None:
        """Of this attempt's batch."""
        self._paused.add(attempt)

    def take_paused(self) -> set[str]:
        """The attempts whose journals have paused since the last call; some write again already."""
        taken = set()
        while self._paused:
            taken.add(self._paused.pop())
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class _Unwritten:
    """A note that Redis doesn't have yet."""

    rank: int
    row: bytes
    is_late: bool = False  # others followed it here: what stands already can't replace it


def _unwritten(note: Note, *, is_late: bool = False) -> _Unwritten:
    rank = rank_of(note) if isinstance(note, Partial) else 0
    return _Unwritten(rank, pack(note), is_late)


class Journal:
    """One batch's turns. Safe to share between threads; a passenger of its process' round trips."""

    def __init__(self, journals: Journals, claim: Claim) -> None:
        self._of = journals
        self._attempt = claim.attempt
        self._key = journals.keys.journal(claim.message.run, claim.name)
        self._notes: dict[str, Note] = {}  # by field in Redis
        self._unwritten: dict[str, _Unwritten] = {}  # by field in Redis
        self._wanted: dict[str, None] = {}  # fields to be looked up, in order
        self._sent: dict[str, _Unwritten] = {}  # on the trip that is under way
        self._asked: list[str] = []  # on the trip that is under way
        self._paused_until = 0.0
        self._lock = threading.Lock()  # of these but the trip's two, never held for long

    def load(self) -> None:
        """Take in every note that is there, and write those that are not. Due after each claim,
        before S3 is asked.

        Raises QueueUnavailable: without the journal, what has ended would be made again.
        """
        with translated_redis(self._of.where):
            rows = cast("dict[bytes, bytes]", self._of.redis.hgetall(self._key))
        self._paused_until = 0.0
        found = {name.decode(): unpack(row) for name, row in rows.items()}
        with self._lock:
            for name, note in found.items():
                self._take_in(name, note)
            for name in self._notes.keys() - found.keys():  # Redis was emptied, say
                self._unwritten.setdefault(name, _unwritten(self._notes[name], is_late=True))
        self.flush()

    def known(self, prompt_key: str, turn: int, input_ids: list[int]) -> Answer | None:
        """The finished turn, if it was asked with these ids, as far as this process knows."""
        ended = self._notes.get(_field(prompt_key, turn))
        if not isinstance(ended, Ended) or ended.asked_digest != digest_of(input_ids):
            return None
        return replace(ended.answer, input_ids=input_ids)

    async def find(
        self, prompt_key: str, turn: int, input_ids: list[int]
    ) -> Answer | Partial | None:
        """The turn, finished or not, if these ids were asked; looked up once more in Redis."""
        field = _field(prompt_key, turn)
        if field not in self._notes and not self._is_paused():
            with self._lock:
                self._wanted |= {field: None, field + _PARTIAL: None}
            await self.exchange()
        if answer := self.known(prompt_key, turn, input_ids):
            return answer
        partial = self._notes.get(field + _PARTIAL)
        if isinstance(partial, Partial) and partial.asked_digest == digest_of(input_ids):
            return partial
        return None

    async def keep(self, prompt_key: str, answer: Answer) -> Answer:
        """Note a turn that ended; return the one that stands, ours or an earlier one.

        An earlier one that was asked with other ids stands for nobody here: ours is returned.
        """
        field = _field(prompt_key, answer.turn)
        ended = Ended(digest_of(answer.input_ids), answer)
        unwritten = _unwritten(ended)
        with self._lock:
            self._notes[field] = ended
            self._notes.pop(field + _PARTIAL, None)
            self._unwritten[field] = unwritten
            self._unwritten.pop(field + _PARTIAL, None)
        loop, trips = asyncio.get_running_loop(), self._of.trips
        over = loop.create_future()
        trips.join(self, over)
        loop.call_later(self._of.together_s, trips.go)
        await over
        if self._notes.get(field) is ended:
            return answer
        return self.known(prompt_key, answer.turn, answer.input_ids) or answer

    def put(self, prompt_key: str, partial: Partial) -> None:
        """Note an unfinished turn with whatever is written next. Costs no round trip."""
        field = _field(prompt_key, partial.turn) + _PARTIAL
        unwritten = _unwritten(partial)
        with self._lock:
            self._notes[field] = partial
            self._unwritten[field] = unwritten

    def flush(self) -> None:
        """Write what is unwritten, of every turn, and wait for that. Not in an event loop."""
        over: Future[None] = Future()
        self._of.trips.join(self, over)
        self._of.trips.go()
        over.result()

    async def exchange(self) -> None:
        """The same in an event loop."""
        over = asyncio.get_running_loop().create_future()
        self._of.trips.join(self, over)
        self._of.trips.go()
        await over

    def write_soon(self) -> None:
        """The same, and wait for nothing."""
        self._of.trips.join(self, Future())
        self._of.trips.go()

    def commands(self) -> list[Command]:
        """For the next trip: a write and a look-up, as far as there is anything for them."""
        with self._lock:
            if self._is_paused():
                self._stay()
                return []
            self._sent = dict(islice(self._unwritten.items(), _WRITTEN_AT_ONCE))
            self._asked, self._wanted = list(self._wanted), {}
        commands: list[Command] = []
        if self._sent:
            args: list[str | int | bytes] = [JOURNAL_S]
            for field, note in self._sent.items():
                ended_field = field.removesuffix(_PARTIAL)
                args += [ended_field, ended_field + _PARTIAL, note.rank, note.row]
            commands.append(("EVAL", _WRITE, 1, self._key, *args))
        if self._asked:
            commands.append(("HMGET", self._key, *self._asked))
        return commands

    def hear(self, replies: Sequence[Any]) -> bool:
        """What stands in place of what was written, and what was looked up."""
        with self._lock:
            if self._sent:
                self._take_written(replies[0])
            if self._asked:
                for field, row in zip(self._asked, replies[-1], strict=True):
                    if row is not None:
                        self._take_in(field, unpack(row))
            return len(self._sent) == _WRITTEN_AT_ONCE and bool(self._unwritten)

    def miss(self, error: QueueUnavailable) -> None:
        """Keep the rows here for a while."""
        self._paused_until = time.monotonic() + self._of.pause_s
        self._of.note_paused(self._attempt)
        with self._lock:
            self._stay()
        log.warning("journal pauses, %d rows kept here: %s", len(self._unwritten), error)

    def _stay(self) -> None:
        """Off the trip, with all there is: nobody waits for it, who comes next builds on it."""
        self._sent, self._asked, self._wanted = {}, [], {}
        self._unwritten = {f: replace(note, is_late=True) for f, note in self._unwritten.items()}

    def _take_written(self, others: Sequence[bytes]) -> None:
        for (field, note), other in zip(self._sent.items(), others, strict=True):
            if self._unwritten.get(field) is note:
                del self._unwritten[field]
            if other and not note.is_late:
                self._notes.pop(field, None)
                self._take_in(field, unpack(other))

    def _take_in(self, field: str, note: Note | None) -> None:
        """A finished turn that is known here stays; a partial one gives way to no lower one."""
        known = self._notes.get(field)
        if isinstance(note, Ended) and known is None:
            self._notes.pop(field + _PARTIAL, None)
            self._notes[field] = note
        elif isinstance(note, Partial) and (
            not isinstance(known, Partial) or rank_of(note) >= rank_of(known)
        ):
            self._notes[field] = note

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until


def _field(prompt_key: str, turn: int) -> str:
    return f"{prompt_key}:{turn}"
