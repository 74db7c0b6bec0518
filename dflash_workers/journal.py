"""What has ended of a batch, noted in Redis the moment it ends, for whoever holds the batch next.

Written by rollout (keep), read at each claim (load) and before each turn is started (find). One
hash per batch, one field per finished turn, the first row wins whoever wrote it. Rows hold ids and
facts; text is decoded from the ids again. Redis away or full pauses the journal with a warning:
rows are kept here, written once it answers, and the batch commits without it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass

import redis

from dflash_workers.claims import Claim
from dflash_workers.contract.errors import Corrupt, QueueUnavailable
from dflash_workers.contract.hints import translated_redis
from dflash_workers.contract.keys import JOURNAL_S, RedisKeys
from dflash_workers.contract.lines import compress, decompress, dump, load
from dflash_workers.contract.records import Answer

log = logging.getLogger(__name__)

PAUSE_S = 5.0  # with Redis away, how long no turn waits for it

# KEYS: journal.  ARGV: field, row, lifetime (s).  Returns the row that stands.
_NOTE = """
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return redis.call('HGET', KEYS[1], ARGV[1])
"""


@dataclass(frozen=True, slots=True)
class Journals:
    """Opens the journal of each batch. `redis` should time out in seconds: turns wait for it."""

    redis: redis.Redis
    keys: RedisKeys
    where: str
    pause_s: float = PAUSE_S

    def open(self, claim: Claim) -> Journal:
        """The journal of a claimed batch."""
        return Journal(self, self.keys.journal(claim.message.run, claim.name))


class Journal:
    """One batch's finished turns. Safe to share between threads."""

    def __init__(self, journals: Journals, key: str) -> None:
        self._of = journals
        self._key = key
        self._note = journals.redis.register_script(_NOTE)
        self._rows: dict[str, Answer] = {}
        self._unwritten: dict[str, bytes] = {}
        self._paused_until = 0.0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Take in every row that is there. Due after each claim, before S3 is asked.

        Raises QueueUnavailable: without the journal, what has ended would be made again.
        """
        with translated_redis(self._of.where):
            fields: dict[bytes, bytes] = self._of.redis.hgetall(self._key)  # type: ignore[assignment]
        with self._lock:
            # Our own that are gone (Redis was emptied) are noted again with the next turn.
            self._unwritten |= {
                f: _pack(a) for f, a in self._rows.items() if f.encode() not in fields
            }
            for field, row in fields.items():
                if answer := _unpack(row):
                    self._rows.setdefault(field.decode(), answer)

    def known(self, prompt_key: str, turn: int) -> Answer | None:
        """The finished turn, as far as this process knows."""
        return self._rows.get(_field(prompt_key, turn))

    def find(self, prompt_key: str, turn: int) -> Answer | None:
        """The finished turn, looked up once more in Redis where it isn't known here."""
        field = _field(prompt_key, turn)
        if field not in self._rows and not self._is_paused():
            try:
                with translated_redis(self._of.where):
                    row: bytes | None = self._of.redis.hget(self._key, field)  # type: ignore[assignment]
            except QueueUnavailable as error:
                self._pause(error)
            else:
                if row is not None and (answer := _unpack(row)):
                    self._rows[field] = answer
        return self._rows.get(field)

    def keep(self, prompt_key: str, answer: Answer) -> Answer:
        """Note a turn that ended; return the one that stands, ours or an earlier one."""
        field = _field(prompt_key, answer.turn)
        with self._lock:
            self._rows[field] = answer
            self._unwritten[field] = _pack(answer)
            if not self._is_paused():
                self._write(field)
            return self._rows[field]

    def _write(self, current: str) -> None:
        """Write what is unwritten; take over what stands already for the current turn.

        Turns written late were followed by others here, so those keep to our own.
        """
        try:
            for field, row in list(self._unwritten.items()):
                with translated_redis(self._of.where):
                    stands = self._note(keys=[self._key], args=[field, row, JOURNAL_S])
                del self._unwritten[field]
                if field == current and stands != row and (answer := _unpack(stands)):
                    self._rows[field] = answer
        except QueueUnavailable as error:
            self._pause(error)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _pause(self, error: QueueUnavailable) -> None:
        self._paused_until = time.monotonic() + self._of.pause_s
        log.warning("journal pauses, %d rows kept here: %s", len(self._unwritten), error)


def _field(prompt_key: str, turn: int) -> str:
    return f"{prompt_key}:{turn}"


def _pack(answer: Answer) -> bytes:
    facts = dataclasses.replace(answer, content="", reasoning_content="", tool_calls=[])
    return compress(dump(facts))


def _unpack(row: bytes) -> Answer | None:
    """None for a row that this version can't read: that turn is made again."""
    try:
        return load(Answer, decompress(row))
    except Corrupt as error:
        log.warning("journal row ignored: %s", error)
        return None
