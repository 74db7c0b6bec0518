"""The microbatch: what a step eats, in one form whether its rows hold one sample or many.

Made by intake.py of rows that packing.py arranged, read by features.py and step.py, sent from rank
to rank by topology.py. A padded microbatch is a packed one with one document per row. Invariant: it
is a pure function of its samples, its place and the recipe, so that whoever resumes makes the same
bits, and its anchors are those of (seed, epoch, sample) wherever the sample lies.

B batch, L context length, A anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.anchors import Document, draw_packed_anchors

if TYPE_CHECKING:
    from trainer.tokens.shards import Sample

    Row = Sequence[tuple[Sample, int]]  # samples, and the lengths that they are cut to

NO_DOCUMENT = -1  # the document number of padding


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """How samples become microbatches."""

    batch_size: int  # rows of a microbatch
    num_anchors: int  # blocks of a row
    max_len: int  # tokens of a row at most; longer samples are cut, their prompt never
    pad_multiple: int = 8  # tokens, of padded rows: fewer shapes, fewer compilations
    min_samples: int = 8  # fewer can't teach anything
    keep_features_mb: int = 0  # of memory for the target's features; 0: made anew each time
    packed: bool = False  # rows of max_len tokens with several samples each: one shape for ever
    buffer_rows: int = 1024  # rows that are shuffled together: more mix better, resume slower

    def __post_init__(self) -> None:
        sizes = (self.batch_size, self.num_anchors, self.pad_multiple, self.buffer_rows)
        if min(sizes) < 1 or self.max_len < 3:
            raise BadInput(f"{self}: sizes must be positive")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the endless row of microbatches: a window of samples, and how far it is done."""

    epoch: int = 0
    shard: int = 0  # in the epoch's sequence of shards: where the window begins
    row: int = 0  # in that shard
    window: int = 0  # windows of this epoch before it
    index: int = 0  # microbatches of the window that are done
    number: int = 0  # microbatches that are done, over all epochs
    seed: int = 0  # of shuffling and anchors


class PlacedSample(NamedTuple):
    """A sample in a row."""

    key: str  # "<prompt key>:<turn>"
    start: int  # its first place in the row
    length: int  # tokens, after cutting


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of documents with padding behind them, and their anchors."""

    number: int  # over all epochs, from 0
    ids_BL: Tensor
    positions_BL: Tensor  # within the document; 0 at padding
    documents_BL: Tensor  # number of the document in its row; NO_DOCUMENT at padding
    anchors_BA: Tensor  # ascending, NO_ANCHOR in unused slots
    samples: list[list[PlacedSample]]  # by row
    after: Place  # where training goes on once this one is done

    @property
    def num_tokens(self) -> int:
        """Without the padding."""
        return sum(sample.length for row in self.samples for sample in row)

    def to(self, device: torch.device) -> MicroBatch:
        """On a device; where pinned, the copy goes on beside other work."""
        return self._with([t.to(device, non_blocking=True) for t in self.tensors()])

    def pin(self) -> MicroBatch:
        """In memory that a GPU copies from by itself."""
        return self._with([t.pin_memory() for t in self.tensors()])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All int64: ids, positions, documents, anchors."""
        return self.ids_BL, self.positions_BL, self.documents_BL, self.anchors_BA

    def _with(self, tensors: Sequence[Tensor]) -> MicroBatch:
        ids_BL, positions_BL, documents_BL, anchors_BA = tensors
        return replace(
            self,
            ids_BL=ids_BL,
            positions_BL=positions_BL,
            documents_BL=documents_BL,
            anchors_BA=anchors_BA,
        )


def make_microbatch(
    rows: Sequence[Row], recipe: DataRecipe, *, at: Place, after: Place
) -> MicroBatch:
    """`at` is its own place."""
    num_rows = recipe.batch_size if recipe.packed else len(rows)
    width = recipe.max_len if recipe.packed else _padded_width(rows, recipe.pad_multiple)
    ids, positions = np.zeros((2, num_rows, width), dtype=np.int64)
    documents = np.full((num_rows, width), NO_DOCUMENT, dtype=np.int64)
    anchors = [_anchors(row, recipe.num_anchors, at) for row in rows]
    anchors += [draw_packed_anchors([], recipe.num_anchors)] * (num_rows - len(rows))
    placed: list[list[PlacedSample]] = [[] for _ in range(num_rows)]
    for row, members in enumerate(rows):
        start = 0
        for number, (sample, length) in enumerate(members):
            span = slice(start, start + length)
            ids[row, span] = sample.ids[:length]
            positions[row, span] = np.arange(length)
            documents[row, span] = number
            placed[row].append(PlacedSample(sample_key(sample), start, length))
            start += length
    return MicroBatch(
        number=at.number,
        ids_BL=torch.from_numpy(ids),
        positions_BL=torch.from_numpy(positions),
        documents_BL=torch.from_numpy(documents),
        anchors_BA=torch.from_numpy(np.stack(anchors)),
        samples=placed,
        after=after,
    )


def sample_key(sample: Sample) -> str:
    """What tells a sample from all others of its run."""
    return f"{sample.prompt_key}:{sample.turn}"


def _padded_width(rows: Sequence[Row], pad_multiple: int) -> int:
    longest = max(sum(length for _, length in row) for row in rows)
    return max(1, -(-longest // pad_multiple)) * pad_multiple


def _anchors(
    row: Sequence[tuple[Sample, int]], num_anchors: int, at: Place
) -> npt.NDArray[np.int64]:
    documents, start = [], 0
    for sample, length in row:
        draw = (at.seed, at.epoch, sample_key(sample))
        documents.append(Document(start, sample.prompt_len, length, draw))
        start += length
    return draw_packed_anchors(documents, num_anchors)
