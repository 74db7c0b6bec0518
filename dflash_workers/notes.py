"""What a note of the journal holds: ids and facts of one turn, finished or not.

Packed and unpacked by journal.py; answering.py makes Partials and goes on from them. Text is
decoded from the ids again, and the ids that a turn was asked with stand there as a digest: whoever
reads the note has them, or may not use it. So 2,300 tokens take at most 8 KB, however long the
prompt.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace

import orjson

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.lines import compress, decompress, dump, load
from dflash_workers.contract.records import Answer

log = logging.getLogger(__name__)

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished turn, its answer without text and without the ids that it was asked with."""

    asked_digest: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Partial:
    """An unfinished turn: all of its output so far."""

    asked_digest: str
    turn: int
    seed: int
    output_ids: list[int]
    segments: list[int]  # lengths of the pieces that output_ids was generated in
    num_asked: int = 1  # 2: asked again, after an answer that was flagged
    latency_s: float = 0.0  # of the pieces


Note = Ended | Partial


def extended(partial: Partial, output_ids: list[int], latency_s: float) -> Partial:
    """With one more piece. Both lists may be the answer's own: nobody changes them."""
    return Partial(
        partial.asked_digest,
        partial.turn,
        partial.seed,
        output_ids=partial.output_ids + output_ids if partial.output_ids else output_ids,
        segments=[*partial.segments, len(output_ids)] if output_ids else partial.segments,
        num_asked=partial.num_asked,
        latency_s=partial.latency_s + latency_s,
    )


def digest_of(input_ids: list[int]) -> str:
    """32 hex digits that tell what was asked."""
    return hashlib.sha256(orjson.dumps(input_ids)).hexdigest()[:32]


def rank_of(partial: Partial) -> int:
    """Which of two partial notes of a turn stays: of the later asking, then the longer. Over 0."""
    return (partial.num_asked << 32) + len(partial.output_ids)


def pack(note: Note) -> bytes:
    """The note as it stands in Redis: a zstd frame; a partial one's rank and ":" before it."""
    if isinstance(note, Partial):
        return b"%d:" % rank_of(note) + compress(dump(note))
    facts = replace(note.answer, input_ids=[], content="", reasoning_content="", tool_calls=[])
    return compress(dump(Ended(note.asked_digest, facts)))


def unpack(row: bytes) -> Note | None:
    """Inverse of pack. None for a row that this version can't read: that turn is made again."""
    try:
        if row.startswith(_ZSTD_MAGIC):
            return load(Ended, decompress(row))
        return load(Partial, decompress(row.partition(b":")[2]))
    except Corrupt as error:
        log.warning("journal row ignored: %s", error)
        return None
