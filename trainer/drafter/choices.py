"""Which token the target chooses: its best one or, at a temperature, a sample.

Used by speculate.py, in plain and in speculative decoding alike. Invariant: a choice depends on the
logits, the seed, the prompt's number and the place in the reply, and on nothing else: every place
has its random number before decoding begins. So the reply is the same however it was cut into
blocks, whatever was drafted, and with whom it was decoded.

B rows, L places in a row's reply, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_workers.contract.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target chooses."""

    temperature: float = 0.0  # 0: its best token
    seed: int = 0
    first_number: int = 0  # of the prompts; each number has draws of its own

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise BadInput(f"temperature {self.temperature} is below 0")


GREEDY = Sampling()


class Chooser:
    """The choices of some prompts."""

    def __init__(
        self, sampling: Sampling, num_prompts: int, num_places: int, device: torch.device
    ) -> None:
        self._temperature = sampling.temperature
        self._draws_BL = torch.empty(0)
        if sampling.temperature:
            draws = [
                np.random.default_rng([sampling.seed, sampling.first_number + i]).random(num_places)
                for i in range(num_prompts)
            ]
            self._draws_BL = torch.from_numpy(np.stack(draws)).to(device)

    def choose(self, logits_BLV: Tensor, numbers_B: Tensor, first_B: Tensor) -> Tensor:
        """Ids, [B, L]; `first_B`: the place in its reply of each row's first one."""
        if not self._temperature:
            return logits_BLV.argmax(-1)
        return self._sample(logits_BLV, numbers_B, first_B)[0]

    def choose_with_gaps(
        self, logits_BLV: Tensor, numbers_B: Tensor, first_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids, and how near another choice was: of the two best logits or, at a temperature, of
        the draw and the nearest share of probability that isn't the chosen token's.
        """
        if self._temperature:
            return self._sample(logits_BLV, numbers_B, first_B)
        best = logits_BLV.topk(2)
        return best.indices[..., 0], best.values[..., 0] - best.values[..., 1]

    def _sample(
        self, logits_BLV: Tensor, numbers_B: Tensor, first_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        places_L = torch.arange(logits_BLV.shape[1], device=logits_BLV.device)
        places_BL = (first_B[:, None] + places_L).clamp_max(self._draws_BL.shape[1] - 1)
        draws_BL1 = self._draws_BL[numbers_B[:, None], places_BL][..., None]
        # In double: the sum of a hundred thousand shares must not round a token away.
        upto_BLV = (logits_BLV.double() / self._temperature).softmax(-1).cumsum(-1)
        draws_BL1 = draws_BL1 * upto_BLV[..., -1:]
        ids_BL1 = torch.searchsorted(upto_BLV, draws_BL1, right=True)
        ids_BL1 = ids_BL1.clamp_max(logits_BLV.shape[-1] - 1)
        above_BL1 = upto_BLV.gather(-1, ids_BL1) - draws_BL1
        below_BL1 = draws_BL1 - upto_BLV.gather(-1, (ids_BL1 - 1).clamp_min(0))
        nearest_BL1 = torch.where(ids_BL1 > 0, above_BL1.minimum(below_BL1), above_BL1)
        return ids_BL1[..., 0], nearest_BL1[..., 0]
