"""Who is suspect when an engine dies, or its worker with it: noted per batch for its next holders.

Called by generate: load and `attending` around a claimed batch, `schedule` for what is left of it,
`blame` when an engine was seen to die (refused connection, dead pid, stuck scheduler). What was
started then is suspect; twice, and it runs alone and last; alone twice, and it is rejected with the
evidence. A lease that ran out counts nothing by itself, for the node may be gone; only when five in
a row left a batch without a word and without a new row is every prompt left suspect. Noted as
facts, not as counts, so that each note may be repeated. Redis away: noted here, written later.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import redis
import uuid_utils

from dflash_workers.claims import Claim
from dflash_workers.contract.errors import Corrupt, FleetError, QueueUnavailable
from dflash_workers.contract.keys import JOURNAL_S, RedisKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import Prompt

log = logging.getLogger(__name__)

SUSPECT_AFTER = 2  # deaths of an engine; one may be anybody's
CONDEMNED_AFTER = 2  # of these alone; the first may be a coincidence
SILENT_ENDS = 5  # of workers, one after the other without a new row
EVIDENCE_CHARS = 500
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# The fields of the hash `suspects:<run>:<batch>`:
_DEATH = "death:"  # + id in the order of time: Death
_START = "start:"  # + attempt: the prompt that it runs alone, or "". Removed when it ends well.
_ALONE = "alone:"  # + attempt: the same, of a start before the last new row
_STRUCK = "struck"  # SILENT_ENDS was reached once

# A new row: earlier starts make no series any more, but who ran alone is remembered.
# KEYS: suspects.  ARGV: this attempt.
_PROGRESS = """
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local attempt = string.match(fields[i], '^start:(.*)$')
  if attempt and attempt ~= ARGV[1] then
    if fields[i + 1] ~= '' then redis.call('HSET', KEYS[1], 'alone:' .. attempt, fields[i + 1]) end
    redis.call('HDEL', KEYS[1], fields[i])
  end
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Death:
    """An engine died while these prompts ran in it."""

    prompt_keys: list[str]
    alone: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a batch."""

    deaths: list[Death] = field(default_factory=list)  # in the order of time
    gone_alone: list[str] = field(default_factory=list)  # a worker went silent with this one alone
    is_struck: bool = False  # workers fall silent on this batch


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against one prompt."""

    num_deaths: int
    num_alone: int  # of them, with nothing else in the engine
    evidence: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the prompts that are left run."""

    together: list[Prompt]  # first
    alone: list[Prompt]  # then, one by one in this order, nothing else in the engine
    condemned: list[tuple[Prompt, str]]  # with the evidence; never again


def suspicion_of(prompt_key: str, history: History) -> Suspicion:
    """All that speaks against the prompt."""
    deaths = [death for death in history.deaths if prompt_key in death.prompt_keys]
    num_alone = sum(death.alone for death in deaths)
    evidence = deaths[-1].evidence if deaths else ""
    num_gone = history.gone_alone.count(prompt_key) if history.is_struck else 0
    if num_gone:
        silent = f"its worker fell silent {num_gone} times while this prompt ran alone"
        evidence = f"{silent}; {evidence}" if evidence else silent
    return Suspicion(len(deaths) + num_gone, num_alone + num_gone, evidence)


def schedule(prompts: Sequence[Prompt], history: History) -> Schedule:
    """Who runs with whom.

    Of the suspects the least suspect runs first, so that it has ended when the next death comes.
    """
    plan = Schedule([], [], [])
    held = {prompt.key: suspicion_of(prompt.key, history) for prompt in prompts}
    for prompt in prompts:
        suspicion = held[prompt.key]
        if suspicion.num_alone >= CONDEMNED_AFTER:
            plan.condemned.append((prompt, suspicion.evidence))
        elif history.is_struck or suspicion.num_deaths >= SUSPECT_AFTER:
            plan.alone.append(prompt)
        else:
            plan.together.append(prompt)
    plan.alone.sort(key=lambda prompt: (held[prompt.key].num_alone, held[prompt.key].num_deaths))
    return plan


@dataclass(frozen=True, slots=True)
class Suspects:
    """Opens the case of each batch. `redis` should time out in seconds."""

    redis: redis.Redis
    keys: RedisKeys
    where: str

    def open(self, claim: Claim) -> Case:
        """Of a claimed batch."""
        return Case(self, claim)


class Case:
    """What is noted of one batch. Safe to share between threads; only `load` minds Redis away."""

    def __init__(self, suspects: Suspects, claim: Claim) -> None:
        self.history = History()
        self.is_inherited = False  # an earlier holder left it without a word
        self._of = suspects
        self._name = claim.name
        self._key = suspects.keys.suspects(claim.message.run, claim.name)
        self._attempt = claim.attempt
        self._progress = suspects.redis.register_script(_PROGRESS)
        self._is_series = False  # others' starts are noted, which a new row would end
        self._unwritten: dict[str, bytes] = {}
        self._blamed: dict[str, Death] = {}  # by the names of their notes
        self._lock = threading.Lock()

    def load(self) -> None:
        """Take in what is noted. Due after each claim. Raises QueueUnavailable."""
        with translated_redis(self._of.where):
            found: dict[bytes, bytes] = self._of.redis.hgetall(self._key)  # type: ignore[assignment]
        with self._lock:
            fields = {name.decode(): value for name, value in found.items()} | self._unwritten
            fields.pop(_START + self._attempt, None)
            starts = [value.decode() for name, value in fields.items() if name.startswith(_START)]
            alone = [value.decode() for name, value in fields.items() if name.startswith(_ALONE)]
            deaths = [_unpack(fields[name]) for name in sorted(fields) if name.startswith(_DEATH)]
            self._is_series = bool(starts)
            self.is_inherited = bool(starts or alone)
            self.history = History(
                deaths=[death for death in deaths if death],
                gone_alone=[prompt_key for prompt_key in starts + alone if prompt_key],
                is_struck=_STRUCK in fields or len(starts) >= SILENT_ENDS,
            )
            if self.history.is_struck and _STRUCK not in fields:
                log.warning("%s: %d workers in a row fell silent on it", self._name, len(starts))
                self._note(_STRUCK, b"1")

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around the work on the batch: leaving it normally or by an error of ours is a good end.

        Anything else, an unexpected error of our own code too, is a silent end.
        """
        self.note_running()
        try:
            yield
        except FleetError:
            self._note_end()
            raise
        self._note_end()

    def note_running(self, alone: str = "") -> None:
        """What runs from now on: the prompt of this key alone, or all that run together."""
        with self._lock:
            self._note(_START + self._attempt, alone.encode())

    def note_progress(self) -> None:
        """A new row is journalled. Costs nothing where nobody fell silent before."""
        with self._lock:
            if not self._is_series:
                return
            try:
                with translated_redis(self._of.where):
                    self._progress(keys=[self._key], args=[self._attempt])
                self._is_series = False
            except QueueUnavailable as error:
                log.warning("%s: a new row is not noted: %s", self._name, error)

    async def heed_progress(self) -> None:
        """The same from an event loop, which never waits for Redis."""
        if self._is_series:
            await asyncio.to_thread(self.note_progress)

    def blame(
        self, prompt_keys: Iterable[str], what: str, log_tail: str = "", *, alone: bool
    ) -> str:
        """An engine was seen to die while these ran in it; `what` and log become the evidence.
        Returns the note's name, to absolve by.

        `alone`: there was one, and no request of another batch either, in an engine that had
        answered something since its start. Else a broken engine would condemn whoever comes first.
        """
        death = Death([*prompt_keys], alone, describe_death(what, log_tail))
        with self._lock:
            self.history = replace(self.history, deaths=[*self.history.deaths, death])
            name = f"{_DEATH}{uuid_utils.uuid7()}"
            self._blamed[name] = death
            self._note(name, dump(death))
            return name

    def absolve(self, name: str) -> None:
        """That death was none. Noted at first all the same: who blames may die of it himself."""
        with self._lock:
            deaths, death = list(self.history.deaths), self._blamed.pop(name)
            if death in deaths:  # else it is forgotten already: Redis was emptied
                deaths.remove(death)
            self.history = replace(self.history, deaths=deaths)
            self._remove(name, "a death that was none still counts")

    def of(self, prompt_key: str) -> Suspicion:
        """What is held against one prompt now."""
        return suspicion_of(prompt_key, self.history)

    def _note(self, name: str, value: bytes) -> None:
        self._unwritten[name] = value
        try:
            with translated_redis(self._of.where), self._of.redis.pipeline() as transaction:
                for field_name, note in self._unwritten.items():
                    transaction.hset(self._key, field_name, note)
                transaction.expire(self._key, JOURNAL_S)
                transaction.execute()
            self._unwritten.clear()
        except QueueUnavailable as error:
            log.warning("%s: suspects are kept here for now: %s", self._name, error)

    def _note_end(self) -> None:
        with self._lock:
            self._remove(_START + self._attempt, "its end will count as silent")

    def _remove(self, name: str, else_what: str) -> None:
        self._unwritten.pop(name, None)
        try:
            with translated_redis(self._of.where):
                self._of.redis.hdel(self._key, name)
        except QueueUnavailable as error:
            log.warning("%s: %s: %s", self._name, else_what, error)


def describe_death(what: str, log_tail: str = "") -> str:
    """Evidence in one line: what was observed ("exit status -9"), then the end of the log.

    Colours are dropped, control characters escaped; EVIDENCE_CHARS at most.
    """
    head = _escaped(what)[: EVIDENCE_CHARS // 2]
    tail = "".join(f" | {_escaped(line)}" for line in log_tail.splitlines() if line.strip())
    if len(head) + len(tail) > EVIDENCE_CHARS:
        tail = " | ..." + tail[len(head) + len(" | ...") - EVIDENCE_CHARS :]
    return head + tail


def _escaped(text: str) -> str:
    text = _COLOUR.sub("", text).strip()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _unpack(value: bytes) -> Death | None:
    """None for one that this version can't read."""
    try:
        return load(Death, value)
    except Corrupt as error:
        log.warning("note of a death ignored: %s", error)
        return None
