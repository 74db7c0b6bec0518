"""The whole target reading several sequences at once, each at its own pace.

Used by speculate.py. A target whose layers all attend, over everything or over a window, keeps keys
and values by position (row_cache.py) and forgets a rejected draft for nothing. One with recurrent
layers can't go back: what a draft did to its state stays. Such a target computes each sequence
anew from its beginning, which is exact and slow, so no sequence may be longer than
RECOMPUTED_TOKENS; a server's own figures are the ones of record there. Invariant: logits and
features of a row are those of the row alone, to rounding.

B rows, L new tokens of each, W slots looked at, X places asked about, F features, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import FULL, SLIDING
from trainer.drafter.row_cache import RowCache
from trainer.online.target import FrozenTarget

RECOMPUTED_TOKENS = 1024  # of a sequence, prompt included


class TargetRows:
    """Sequences that one target reads; a row's first tokens are its prompt."""

    def read(self, ids_BL: Tensor, starts_B: Tensor, asked_BX: Tensor) -> Tensor:
        """Logits, [B, X, V], at `asked_BX` of the new tokens; these stand at positions `starts_B`
        and on, over whatever stood there. What is behind a row's own tokens is no matter.
        """
        raise NotImplementedError

    def features(self) -> Tensor:
        """[B, L, F] of the tokens just read; to be taken once."""
        raise NotImplementedError

    def keep(self, rows: Tensor) -> None:
        """These rows alone go on."""
        raise NotImplementedError


def open_rows(target: FrozenTarget, capacity: int) -> TargetRows:
    """For sequences of up to `capacity` tokens. Raises BadInput where these are too long for a
    target that can't go back.
    """
    if can_go_back(target):
        return _CachedRows(target, capacity)
    if capacity > RECOMPUTED_TOKENS:
        raise BadInput(
            "this target has recurrent layers, or ones that attend in chunks, and can't take a "
            f"draft back: at most {RECOMPUTED_TOKENS} tokens of a sequence are computed anew at "
            f"each step, not {capacity}: fewer new tokens, or the figures of a server"
        )
    return _RecomputedRows(target, capacity)


def can_go_back(target: FrozenTarget) -> bool:
    """Whether it can forget tokens; else its speed here says nothing of a server's."""
    return not target.is_recurrent and set(_layer_kinds(target.model.config)) <= {FULL, SLIDING}


class _CachedRows(TargetRows):
    def __init__(self, target: FrozenTarget, capacity: int) -> None:
        self._target = target
        self._cache = RowCache(capacity)
        config = target.model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        kinds = dict.fromkeys(_layer_kinds(config))
        self._windows = {kind: window if kind == SLIDING else None for kind in kinds}
        known = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # before 5.24

    def read(self, ids_BL: Tensor, starts_B: Tensor, asked_BX: Tensor) -> Tensor:
        positions_BL = _positions(ids_BL, starts_B)
        width = int(positions_BL.max()) + 1
        self._cache.expect(positions_BL, width)
        masks = {kind: self._mask(positions_BL, width, w) for kind, w in self._windows.items()}
        return _logits(
            self._target.model,
            asked_BX,
            input_ids=ids_BL,
            position_ids=positions_BL,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            **{self._cache_name: self._cache},
        )

    def features(self) -> Tensor:
        return self._target.take_features()

    def keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)

    def _mask(self, positions_BL: Tensor, width: int, window: int | None) -> Tensor:
        """[B, 1, L, W], added to the scores: the one form that every attention takes."""
        slots_W = torch.arange(width, device=positions_BL.device)
        is_seen_BLW = slots_W <= positions_BL[..., None]
        if window is not None:
            is_seen_BLW &= slots_W > positions_BL[..., None] - window
        dtype = self._target.head_VD.dtype
        mask_BLW = torch.zeros(is_seen_BLW.shape, dtype=dtype, device=positions_BL.device)
        return mask_BLW.masked_fill_(~is_seen_BLW, torch.finfo(dtype).min)[:, None]


class _RecomputedRows(TargetRows):
    def __init__(self, target: FrozenTarget, capacity: int) -> None:
        self._target = target
        self._capacity = capacity
        self._ids_BC: Tensor | None = None
        self._positions_BL = torch.empty(0, 0, dtype=torch.long)

    def read(self, ids_BL: Tensor, starts_B: Tensor, asked_BX: Tensor) -> Tensor:
        if self._ids_BC is None:
            self._ids_BC = ids_BL.new_zeros(len(ids_BL), self._capacity)
        self._positions_BL = _positions(ids_BL, starts_B)
        self._ids_BC.scatter_(1, self._positions_BL, ids_BL)
        width = int(self._positions_BL.max()) + 1
        return _logits(
            self._target.model,
            starts_B[:, None] + asked_BX,
            input_ids=self._ids_BC[:, :width],
            use_cache=False,
        )

    def features(self) -> Tensor:
        features_BWF = self._target.take_features()
        rows_B1 = torch.arange(len(features_BWF), device=features_BWF.device)[:, None]
        return features_BWF[rows_B1, self._positions_BL]

    def keep(self, rows: Tensor) -> None:
        if self._ids_BC is not None:
            self._ids_BC = self._ids_BC[rows]


def _layer_kinds(config: Any) -> Sequence[str]:
    text = config.get_text_config(decoder=True)
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    if kinds is not None:
        return kinds
    if getattr(text, "attention_chunk_size", None) is not None:
        return ["chunked_attention"]
    return [SLIDING if getattr(text, "sliding_window", None) is not None else FULL]


def _positions(ids_BL: Tensor, starts_B: Tensor) -> Tensor:
    return starts_B[:, None] + torch.arange(ids_BL.shape[1], device=ids_BL.device)


def _logits(model: Any, places_BX: Tensor, **inputs: Any) -> Tensor:
    """At some places of each row; the head reads no place that no row asks about."""
    asked_U, order_BX = torch.unique(places_BX, return_inverse=True)
    logits_BUV = model(**inputs, logits_to_keep=asked_U).logits
    rows_B1 = torch.arange(len(places_BX), device=places_BX.device)[:, None]
    logits_BXV: Tensor = logits_BUV[rows_B1, order_BX]
    return logits_BXV
