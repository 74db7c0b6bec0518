"""The target's features of a microbatch, made on the fly or kept from the epoch before.

Between batches.py and step.py. On a GPU features are cheaper to make again than to store (51 KB a
token for a 27B target). Few samples on a CPU are the other way round: there the target's forward is
most of a step, and what it gives never changes. Invariant: a document has the features that it has
alone, whatever shares its row; and a kept feature has the bits that it has when made again, because
then each document goes through the target by itself, so that what was kept before a stop makes no
difference after it.

B batch, L context length, D hidden, F features of the target, N documents.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trainer.online.batches import MicroBatch, PlacedSample
from trainer.online.target import FrozenTarget

MEGABYTE = 1_000_000
LEN_MULTIPLE = 64  # tokens, of documents in rows of their own: fewer shapes


class Features:
    """Features by microbatch; keeps up to `keep_mb` of them in memory, 0: none."""

    def __init__(self, target: FrozenTarget, keep_mb: int) -> None:
        self._target = target
        self._keep_mb = keep_mb
        self._room = keep_mb * MEGABYTE  # bytes
        self._kept: dict[str, Tensor] = {}

    def of(self, batch: MicroBatch) -> Tensor:
        """[B, L, F]; whatever stands at the padding."""
        if not self._keep_mb:
            return self.with_states(batch)[0]
        features_BLF: Tensor | None = None
        for row, document in _documents(batch):
            span = slice(document.start, document.start + document.length)
            made_LF = self._of_document(document.key, batch.ids_BL[row, span])
            if features_BLF is None:
                features_BLF = made_LF.new_zeros(*batch.ids_BL.shape, made_LF.shape[-1])
            features_BLF[row, span] = made_LF
        return self._target.features(batch.ids_BL) if features_BLF is None else features_BLF

    def with_states(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """`of`, and the final states that the head reads, [B, L, D]; neither is kept."""
        if all(len(row) <= 1 for row in batch.samples):
            return self._target.features_and_states(batch.ids_BL)
        if not self._target.is_recurrent:
            return self._target.features_and_states(batch.ids_BL, batch.positions_BL)
        return self._document_by_row(batch)

    def _document_by_row(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Each document in a row of its own, no more tokens at once than the microbatch has."""
        made: tuple[Tensor, Tensor] | None = None
        for group in _groups(list(_documents(batch)), batch.ids_BL.numel()):
            width = _rounded(max(document.length for _, document in group))
            ids_NL = batch.ids_BL.new_zeros(len(group), width)
            for ids_L, (row, document) in zip(ids_NL, group, strict=True):
                begin, length = document.start, document.length
                ids_L[:length] = batch.ids_BL[row, begin : begin + length]
            parts = self._target.features_and_states(ids_NL)
            made = made or _like(parts, batch)
            for whole, part in zip(made, parts, strict=True):
                for states, (row, document) in zip(part, group, strict=True):
                    begin, length = document.start, document.length
                    whole[row, begin : begin + length] = states[:length]
        assert made is not None  # asked for only where a row has documents
        return made

    def _of_document(self, key: str, ids_L: Tensor) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        features_LF = self._target.features(ids_L[None])[0]
        if features_LF.nbytes <= self._room:
            self._room -= features_LF.nbytes
            self._kept[key] = features_LF
        return features_LF


class _InRow(NamedTuple):
    row: int
    document: PlacedSample


def _documents(batch: MicroBatch) -> list[_InRow]:
    return [_InRow(row, d) for row, placed in enumerate(batch.samples) for d in placed]


def _groups(documents: list[_InRow], max_tokens: int) -> list[list[_InRow]]:
    """Documents of like length together, so that few rows have much padding."""
    groups: list[list[_InRow]] = []
    for found in sorted(documents, key=lambda d: -d.document.length):
        width = _rounded(groups[-1][0].document.length) if groups else 0
        if groups and (len(groups[-1]) + 1) * width <= max_tokens:
            groups[-1].append(found)
        else:
            groups.append([found])
    return groups


def _rounded(length: int) -> int:
    return -(-length // LEN_MULTIPLE) * LEN_MULTIPLE


def _like(parts: tuple[Tensor, Tensor], batch: MicroBatch) -> tuple[Tensor, Tensor]:
    features_NLF, states_NLD = parts
    shape = batch.ids_BL.shape
    return (
        features_NLF.new_zeros(*shape, features_NLF.shape[-1]),
        states_NLD.new_zeros(*shape, states_NLD.shape[-1]),
    )
