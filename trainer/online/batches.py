"""Shards -> microbatches: which samples come together, in which order, with which anchors.

Reads what tokens/build.py wrote, hands padded tensors to -> step.py. The order of an epoch is a
pure function of (seed, epoch, samples): a place in it is (epoch, index), and training goes on from
there after a stop without a record of what was drawn. Samples of like length come together, so that
little is padding. Invariant: held-out samples are never trained on, and too few samples are refused
before the first step.

B batch, L context length, A anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.store import Store
from trainer.drafter.anchors import draw_anchors
from trainer.tokens.reading import list_shards
from trainer.tokens.shards import Sample, read_shard

LENGTH_WINDOW = 16  # microbatches sorted by length together: little padding, still shuffled


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """How samples become microbatches."""

    batch_size: int  # sequences of a microbatch
    num_anchors: int  # blocks of a sequence
    max_len: int  # tokens; longer samples are cut, their prompt never
    pad_multiple: int = 8  # tokens; fewer shapes, fewer compilations
    min_samples: int = 8  # fewer can't teach anything
    keep_features_mb: int = 0  # of memory for the target's features; 0: made anew each time

    def __post_init__(self) -> None:
        if min(self.batch_size, self.num_anchors, self.pad_multiple) < 1 or self.max_len < 3:
            raise BadInput(f"{self}: sizes must be positive")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the endless row of microbatches."""

    epoch: int = 0
    index: int = 0  # microbatches of this epoch that are done


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Right-padded sequences with their anchors."""

    ids_BL: Tensor
    lengths_B: Tensor
    anchors_BA: Tensor  # ascending, NO_ANCHOR in unused slots
    samples: list[int]  # indices into the corpus
    after: Place  # where training goes on once this one is done

    def to(self, device: torch.device) -> MicroBatch:
        ids_BL, lengths_B, anchors_BA = (
            t.to(device) for t in (self.ids_BL, self.lengths_B, self.anchors_BA)
        )
        return MicroBatch(ids_BL, lengths_B, anchors_BA, self.samples, self.after)


def read_samples(store: Store, run: str, *, heldout: bool) -> list[Sample]:
    """All samples of a run's shards that are (not) held out, in a fixed order."""
    samples = [s for key in list_shards(store, run) for s in read_shard(store.get(key))]
    return sorted(
        (s for s in samples if s.heldout == heldout), key=lambda s: (s.prompt_key, s.turn)
    )


class Corpus:
    """The samples to train on, cut to length, and their order."""

    def __init__(self, samples: Sequence[Sample], recipe: DataRecipe, *, seed: int) -> None:
        """Raises BadInput where a sample is held out, NotEnough where they are too few."""
        heldout = [s.id for s in samples if s.heldout]
        if heldout:
            raise BadInput(f"sample {heldout[0]!r} is held out: it must not be trained on")
        self.samples = [s for s in samples if s.prompt_len + 2 <= recipe.max_len]
        self._recipe = recipe
        self._seed = seed
        self._lengths = np.array([min(len(s.ids), recipe.max_len) for s in self.samples], int)
        self._check_enough()

    def digest(self) -> str:
        """Hash of what is trained on; a stopped run goes on only with the same."""
        digest = hashlib.sha256()
        for sample, length in zip(self.samples, self._lengths, strict=True):
            digest.update(f"{sample.prompt_key}:{sample.turn}:{sample.prompt_len}:".encode())
            digest.update(sample.ids[:length].astype("<i4").tobytes())
        return digest.hexdigest()

    def largest_id(self) -> int:
        """To be compared with the target's vocabulary."""
        return max(int(s.ids.max()) for s in self.samples)

    def from_place(self, place: Place) -> Iterator[MicroBatch]:
        """Microbatches without end, epoch after epoch."""
        epoch, start = place.epoch, place.index
        while True:
            order = self.epoch_order(epoch)
            for index in range(start, len(order)):
                last = index + 1 == len(order)
                after = Place(epoch + 1, 0) if last else Place(epoch, index + 1)
                yield self._microbatch(order[index], epoch, after)
            epoch, start = epoch + 1, 0

    def epoch_order(self, epoch: int) -> list[list[int]]:
        """Indices of samples, by microbatch; every sample once."""
        random = np.random.default_rng([self._seed, epoch])
        shuffled = random.permutation(len(self.samples))
        size, window = self._recipe.batch_size, self._recipe.batch_size * LENGTH_WINDOW
        batches: list[list[int]] = []
        for start in range(0, len(shuffled), window):
            part = shuffled[start : start + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            batches += [part[i : i + size].tolist() for i in range(0, len(part), size)]
        return [batches[i] for i in random.permutation(len(batches))]

    def _microbatch(self, indices: list[int], epoch: int, after: Place) -> MicroBatch:
        lengths = self._lengths[indices]
        width = -(-int(lengths.max()) // self._recipe.pad_multiple) * self._recipe.pad_multiple
        ids = np.zeros((len(indices), width), dtype=np.int64)
        anchors = []
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            sample = self.samples[index]
            ids[row, :length] = sample.ids[:length]
            draw = (self._seed, epoch, f"{sample.prompt_key}:{sample.turn}")
            anchors.append(
                draw_anchors(
                    sample.prompt_len, length, num_anchors=self._recipe.num_anchors, draw=draw
                )
            )
        return MicroBatch(
            torch.from_numpy(ids),
            torch.from_numpy(lengths),
            torch.from_numpy(np.stack(anchors)),
            indices,
            after,
        )

    def _check_enough(self) -> None:
        if len(self.samples) < self._recipe.min_samples:
            raise NotEnough(
                f"{len(self.samples)} samples of at most {self._recipe.max_len} tokens to train "
                f"on, at least {self._recipe.min_samples} are needed: has `tokenize` run?"
            )
