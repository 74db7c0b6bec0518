"""A segment before it is written: the rows read for it, and what becomes of them.

Filled row by row by <- plan.py, written by -> segments.py. The counts begin with the first row that
is new, so that a call which goes on behind a killed one's segments drafts the ones that follow. A
batch's name is a hash of its content, and nothing here depends on time, place or another call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

import celeryconfig
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.lines import compress_each, dump
from dflash_workers.contract.records import SCHEMA_VERSION, Json, PlannedBatch, Refusal, Segment
from producer.candidates import Candidate
from producer.rules import path_of

SEGMENT_BATCHES = 1000
SEGMENT_BYTES = 1 << 24  # of prompt lines; a producer holds two segments at once
PACKED_BATCHES = 32  # compressed in one go


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How one call plans."""

    # Prompts. A worker runs three batches at once over a limit of 48 in flight, so that 64 keep
    # the engine full while one batch's tail ends. A larger batch commits later; it loses no more,
    # because each finished prompt is noted. A smaller one costs more hints and commits.
    batch_size: int = 64
    priority: int = celeryconfig.PRIORITY_ORDINARY
    road: str = "ids"
    generation: int = 0  # over 0: a retry of prompts that are planned already
    sampling: Json = field(default_factory=dict)  # a retry's overrides, noted beside its batches
    notes: Json = field(default_factory=dict)  # noted in the log

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadInput(f"batch size must be at least 1, not {self.batch_size}")


@dataclass(slots=True)
class Draft:
    """Rows of the segment to come."""

    options: PlanOptions
    candidates: list[Candidate] = field(default_factory=list)
    refusals: dict[int, Refusal] = field(default_factory=dict)  # new ones, by mark
    num_bytes: int = 0  # of the candidates' lines
    num_refused: int = 0  # known ones included
    num_duplicates: int = 0
    num_not_drawn: int = 0

    @property
    def is_new(self) -> bool:
        """Whether there is anything that no segment has."""
        return bool(self.candidates or self.refusals)

    def add(self, candidate: Candidate) -> bool:
        """Take a candidate that is new; True where the segment ends with it."""
        self.candidates.append(candidate)
        self.num_bytes += len(candidate.line)
        num_batches, rest = divmod(len(self.candidates), self.options.batch_size)
        return not rest and (num_batches >= SEGMENT_BATCHES or self.num_bytes >= SEGMENT_BYTES)

    def add_refusal(self, mark: int, refusal: Refusal) -> None:
        """Take a refusal that is new."""
        self.refusals[mark] = refusal

    def forget_refusals(self, marks: Container[int]) -> None:
        """Drop the refusals that somebody else has put on record."""
        self.refusals = {m: refusal for m, refusal in self.refusals.items() if m not in marks}

    def taken_out(self) -> list[Candidate]:
        """The candidates, which are its own no more; the counts stay."""
        candidates, self.candidates, self.num_bytes = self.candidates, [], 0
        return candidates

    def segment(self) -> Segment:
        """What the log will say, but for the number and what is placed in objects."""
        num_resampled = sum(candidate.sample > 0 for candidate in self.candidates)
        num_first = len(self.candidates) - num_resampled
        return Segment(
            schema=SCHEMA_VERSION,
            number=-1,
            batches=[],
            sources=sorted(self._paths()),
            num_rows=num_first + self.num_refused + self.num_duplicates + self.num_not_drawn,
            num_refused=self.num_refused,
            num_duplicates=self.num_duplicates,
            sealed=False,
            num_not_drawn=self.num_not_drawn,
            num_resampled=num_resampled,
            priority=self.options.priority,
            road=self.options.road,
            options=self.options.notes,
        )

    def packed(self) -> tuple[list[PlannedBatch], bytes]:
        """The batches, and the object that their places point into."""
        batches, frames, offset = [], [], 0
        step = PACKED_BATCHES * self.options.batch_size
        for start in range(0, len(self.candidates), step):
            prompts = self.candidates[start : start + step]
            frames_of_step = compress_each(_bodies(prompts, self.options.batch_size))
            for batch, frame in zip(batches_of(prompts, self.options), frames_of_step, strict=True):
                batches.append(replace(batch, offset=offset, num_bytes=len(frame)))
                offset += len(frame)
            frames += frames_of_step
        return batches, b"".join(frames)

    def _paths(self) -> set[str]:
        """The files that the new rows stand in."""
        sources = [candidate.source for candidate in self.candidates]
        sources += [refusal.source for refusal in self.refusals.values()]
        # Most differ in their number alone: cut it off, and little is left to be looked at.
        return {path_of(f"{source}0") for source in {s.rstrip("0123456789") for s in sources}}


def batches_of(candidates: list[Candidate], options: PlanOptions) -> Iterator[PlannedBatch]:
    """Batches in the order of their prompts, named by their content; not placed yet."""
    overrides = dump(sorted(options.sampling.items())).decode()
    for start in range(0, len(candidates), options.batch_size):
        prompts = candidates[start : start + options.batch_size]
        keys = [prompt.key for prompt in prompts]
        contents = [prompt.content_digest for prompt in prompts]
        heldout = "".join(["-+"[prompt.heldout] for prompt in prompts])
        facts = [f"generation {options.generation}", overrides, heldout, *keys, *contents]
        yield PlannedBatch(
            batch=hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24],
            prompt_keys=keys,
            content_digests=contents,
            line_digests=[prompt.line_digest for prompt in prompts],
            offset=0,
            num_bytes=0,
            generation=options.generation,
            sampling=options.sampling,
        )


def _bodies(candidates: list[Candidate], batch_size: int) -> list[bytes]:
    return [
        b"\n".join([*[prompt.line for prompt in candidates[start : start + batch_size]], b""])
        for start in range(0, len(candidates), batch_size)
    ]
