"""A recording made playable: steps that any number of workers can take, each under its own name.

From <- recording.py; to -> players.py. A step belongs to the work, which goes as fast as prompts
do, or to the clock, which ticks for an idle worker alike (heartbeats, sweeps, looks at leases).
Renewals are neither: a player renews what it holds. Names that must differ between workers
(batches, attempts, delivery tags, the slot) are overwritten in place with the worker's number,
which keeps every length, so that what is sent stays well-formed without being built anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.replay.recording import Piece

SLOT = b"replay-0000"  # of the recorded worker
_NUMBER_BYTES = 4  # so many of a name become the worker's number
_UUID = re.compile(rb"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_BATCH = re.compile(rb"\d/([0-9a-f]{24})\b")
_CLAIMS_KEYS = b"5"  # of claims.lua, by which its calls are known
_OF_WORK = (b"BRPOP", b"EXISTS")  # that name no batch: the wait for a hint, the look for tokenizers
_OF_HINTS = (b"unacked_index", b"/0.celeryev/task.multi")
_CONNECTING = (b"CLIENT", b"SELECT", b"SCRIPT", b"PING")


@dataclass(frozen=True, slots=True)
class Held:
    """A batch and the attempt that holds it, as they were recorded."""

    batch: bytes
    attempt: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """What is sent in one go."""

    at_s: float  # since the tape's start
    connection: int
    body: bytes
    places: tuple[int, ...]  # in the body, where the worker's number goes
    num_commands: int
    num_prompts: int = 0  # whose end is noted
    claimed: Held | None = None
    cleared: bytes = b""  # batch

    def as_worker(self, number: bytes) -> bytes:
        """The body under that worker's names; `number` has four digits."""
        return _number_in(self.body, self.places, number)


@dataclass(frozen=True, slots=True)
class Tape:
    """One worker's doings over `length_s` seconds, steps in the order of their times."""

    length_s: float
    scripts: list[bytes]  # that steps call by their hash
    work: list[Step]
    clock: list[Step]
    renewal: Step  # of `renewed`
    renewed: Held
    renew_every_s: float

    @property
    def num_connections(self) -> int:
        """That steps name, from 0 on."""
        return 1 + max(step.connection for step in [*self.work, *self.clock, self.renewal])

    @property
    def num_prompts(self) -> int:
        """Noted as ended."""
        return sum(step.num_prompts for step in self.work)

    @property
    def num_batches(self) -> int:
        """Cleared, which a worker does after its commit."""
        return sum(bool(step.cleared) for step in self.work)

    @property
    def prompts_per_s(self) -> float:
        """As fast as it was recorded."""
        return self.num_prompts / self.length_s

    def held_at(self, index: int) -> list[Step]:
        """The claims that stand before the work's step of that index."""
        claims: dict[bytes, Step] = {}
        for step in self.work[:index]:
            if step.claimed:
                claims[step.claimed.batch] = step
            claims.pop(step.cleared, None)
        return list(claims.values())

    def renewal_of(self, held: Held, number: bytes) -> bytes:
        """What a worker sends to keep a batch that it claimed."""
        body = self.renewal.body.replace(self.renewed.batch, held.batch)
        body = body.replace(self.renewed.attempt, held.attempt)
        return _number_in(body, self.renewal.places, number)


def make_tape(pieces: Sequence[Piece], to_s: float, renew_every_s: float) -> Tape:
    """Of what was sent from the first claim on until then. Raises ValueError where no batch was
    renewed.
    """
    from_s = first_claim_s(pieces)
    scripts = _scripts_in(pieces)
    pieces = [piece for piece in pieces if from_s <= piece.at_s < to_s]
    numbers = {old: new for new, old in enumerate(sorted({p.connection for p in pieces}))}
    steps = [(piece, _step(piece, from_s, numbers)) for piece in pieces]
    renewals = [(piece, step) for piece, step in steps if _verb_of(piece) == b"renew"]
    if not renewals:
        raise ValueError("no batch was renewed while it was recorded: record for longer")
    piece, renewal = renewals[0]
    return Tape(
        length_s=to_s - from_s,
        scripts=scripts,
        work=[step for piece, step in steps if _is_work(piece)],
        clock=[step for piece, step in steps if _is_clock(piece)],
        renewal=renewal,
        renewed=_held_in(piece),
        renew_every_s=renew_every_s,
    )


def first_claim_s(pieces: Sequence[Piece]) -> float:
    """When the worker claimed its first batch. Raises ValueError where it never did."""
    claims = [piece.at_s for piece in pieces if _verb_of(piece) == b"claim"]
    if not claims:
        raise ValueError("no batch was claimed while it was recorded: record for longer")
    return claims[0]


def _scripts_in(pieces: Iterable[Piece]) -> list[bytes]:
    """Each that was loaded, or run by its text, after which it may be called by its hash."""
    scripts: dict[bytes, None] = {}
    for command in (command for piece in pieces for command in piece.commands):
        if command[:2] == [b"SCRIPT", b"LOAD"]:
            scripts[command[2]] = None
        elif command[0] == b"EVAL":
            scripts[command[1]] = None
    return list(scripts)


def _step(piece: Piece, from_s: float, numbers: dict[int, int]) -> Step:
    verb = _verb_of(piece)
    return Step(
        at_s=piece.at_s - from_s,
        connection=numbers[piece.connection],
        body=piece.body,
        places=_places(piece.body),
        num_commands=len(piece.commands),
        num_prompts=sum(map(_num_ended, piece.commands)),
        claimed=_held_in(piece) if verb == b"claim" else None,
        cleared=_held_in(piece).batch if verb == b"clear" else b"",
    )


def _is_work(piece: Piece) -> bool:
    """It would not be sent without batches; renewals apart."""
    if verb := _verb_of(piece):
        return verb in (b"claim", b"clear")
    is_of_hints = any(name in piece.body for name in _OF_HINTS)
    return is_of_hints or piece.commands[0][0] in _OF_WORK or bool(_BATCH.search(piece.body))


def _is_clock(piece: Piece) -> bool:
    is_connecting = piece.commands[0][0] in _CONNECTING
    return not (is_connecting or _is_work(piece) or _verb_of(piece) == b"renew")


def _verb_of(piece: Piece) -> bytes:
    """Of claims.lua; empty for anything else."""
    command = piece.commands[0]
    is_claims = command[0] == b"EVALSHA" and command[2] == _CLAIMS_KEYS
    return command[8] if is_claims else b""


def _held_in(piece: Piece) -> Held:
    """Of a call of claims.lua."""
    _segment, _, batch = piece.commands[0][9].partition(b"/")
    return Held(batch, piece.commands[0][10])


def _num_ended(command: Sequence[bytes]) -> int:
    """Finished turns in a write of the journal: of each four arguments the third is a rank."""
    is_script = command[0] in (b"EVAL", b"EVALSHA") and command[2] == b"1"
    if not is_script or b"journal:" not in command[3]:
        return 0
    return sum(rank == b"0" for rank in command[7::4])


def _places(body: bytes) -> tuple[int, ...]:
    found: Iterable[int] = [
        *(match.start(1) for match in _BATCH.finditer(body)),
        *(match.start() for match in _UUID.finditer(body)),
        *(match.end() - _NUMBER_BYTES for match in re.finditer(re.escape(SLOT), body)),
    ]
    return tuple(sorted(found))


def _number_in(body: bytes, places: Iterable[int], number: bytes) -> bytes:
    numbered = bytearray(body)
    for place in places:
        numbered[place : place + _NUMBER_BYTES] = number
    return bytes(numbered)
