"""The target's features of a microbatch, made on the fly or kept from the epoch before.

Between batches.py and step.py. On a GPU features are cheaper to make again than to store (51 KB a
token for a 27B target). Few samples on a CPU are the other way round: there the target's forward is
most of a step, and what it gives never changes. Invariant: a kept feature has the bits that it has
when made again, because then each sample goes through the target by itself, so that what was kept
before a stop makes no difference after it.

B batch, L context length, F features of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.online.batches import MicroBatch
from trainer.online.target import FrozenTarget

MEGABYTE = 1_000_000


class Features:
    """Features by microbatch; keeps up to `keep_mb` of them in memory, 0: none."""

    def __init__(self, target: FrozenTarget, keep_mb: int) -> None:
        self._target = target
        self._keep_mb = keep_mb
        self._room = keep_mb * MEGABYTE  # bytes
        self._kept: dict[int, Tensor] = {}

    def of(self, batch: MicroBatch) -> Tensor:
        """[B, L, F]; whatever stands at the padding."""
        if not self._keep_mb:
            return self._target.features(batch.ids_BL)
        rows = [
            self._of_sample(sample, ids_L[:length])
            for sample, ids_L, length in zip(
                batch.samples, batch.ids_BL, batch.lengths_B.tolist(), strict=True
            )
        ]
        width = batch.ids_BL.shape[1]
        return torch.stack(
            [torch.nn.functional.pad(row, (0, 0, 0, width - len(row))) for row in rows]
        )

    def _of_sample(self, sample: int, ids_L: Tensor) -> Tensor:
        if sample in self._kept:
            return self._kept[sample]
        features_LF = self._target.features(ids_L[None])[0]
        if features_LF.nbytes <= self._room:
            self._room -= features_LF.nbytes
            self._kept[sample] = features_LF
        return features_LF
