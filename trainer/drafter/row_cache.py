"""Keys and values of several sequences of unlike length: slot i of a row holds its position i.

Used by target_rows.py for the target and by speculate.py for the drafter's context. To forget what
was rejected is to count fewer slots as filled: nothing is cropped, moved or padded, what is stale
is masked until it is written over, and a window of positions is a window of slots. Invariant: a row
is computed as if it were alone.

B rows, L new tokens of each, H heads, C capacity, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class RowBuffer:
    """One tensor, [B, H, C, E], made with the first write."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots_BHCE: Tensor | None = None

    def write(self, new_BHLE: Tensor, slots_BL: Tensor) -> None:
        """Each token into its own slot, over what was there."""
        if self._slots_BHCE is None:
            num_rows, num_heads, _, size = new_BHLE.shape
            self._slots_BHCE = new_BHLE.new_zeros(num_rows, num_heads, self._capacity, size)
        rows_B1 = torch.arange(len(slots_BL), device=slots_BL.device)[:, None]
        self._slots_BHCE[rows_B1, :, slots_BL] = new_BHLE.transpose(1, 2)

    def read(self, width: int) -> Tensor:
        """The first `width` slots of all rows."""
        assert self._slots_BHCE is not None, "read before the first write"
        return self._slots_BHCE[:, :, :width]

    def keep(self, rows: Tensor) -> None:
        """These rows alone go on."""
        if self._slots_BHCE is not None:
            self._slots_BHCE = self._slots_BHCE[rows]


class RowCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What a model of transformers takes for its cache: told before each forward where the new
    tokens lie.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=[])
        self._capacity = capacity
        self._buffers: dict[int, tuple[RowBuffer, RowBuffer]] = {}
        self._slots_BL = torch.empty(0, 0, dtype=torch.long)
        self._width = 0

    def expect(self, slots_BL: Tensor, width: int) -> None:
        """The next forward's tokens, and how many slots its queries look at."""
        self._slots_BL, self._width = slots_BL, width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer's attention: its new keys and values for all that it looks at."""
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = RowBuffer(self._capacity), RowBuffer(self._capacity)
        keys, values = self._buffers[layer_idx]
        keys.write(key_states, self._slots_BL)
        values.write(value_states, self._slots_BL)
        return keys.read(self._width), values.read(self._width)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots that are looked at; positions are always given, so that nobody counts from here."""
        return self._width

    def keep(self, rows: Tensor) -> None:
        """These rows alone go on."""
        for keys, values in self._buffers.values():
            keys.keep(rows)
            values.keep(rows)
