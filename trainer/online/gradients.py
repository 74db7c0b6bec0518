"""The gradients of all weights as one tensor, to be summed over microbatches and ranks.

Owned by step.py. Every parameter's gradient is a view of one flat fp32 tensor, so that a step's sum
over ranks is one collective, and setting to zero and scaling one kernel each. Nothing is summed
while the backward still runs: it is one compiled graph that gives all gradients at its end, so
there is nothing to hide behind. Invariant: a sum is divided once, by the weight of all microbatches
of all ranks; a mean of ranks' means never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SumOver = Callable[[Tensor], None]  # in place, over all ranks that have a drafter


class GradientSums:
    """See the header. Parameters keep their gradients for as long as this lives."""

    def __init__(self, parameters: Iterable[nn.Parameter], sum_over: SumOver) -> None:
        self._parameters = list(parameters)
        self._sum_over = sum_over
        size = sum(p.numel() for p in self._parameters)
        self._flat = torch.zeros(size, dtype=torch.float32, device=self._parameters[0].device)
        place = 0
        for parameter in self._parameters:
            span = self._flat[place : place + parameter.numel()]
            parameter.grad = span.view_as(parameter)
            place += parameter.numel()

    def clear(self) -> None:
        self._flat.zero_()

    def take_from(self, others: Iterable[nn.Parameter]) -> None:
        """Add the gradients of a copy in another type, and drop them there."""
        for ours, theirs in zip(self._parameters, others, strict=True):
            if theirs.grad is not None:
                assert ours.grad is not None
                ours.grad.add_(theirs.grad)
                theirs.grad = None

    def sum_over_ranks(self) -> None:
        self._sum_over(self._flat)

    def norm(self) -> Tensor:
        """Of all of them, before any division."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self._parameters if p.grad is not None]
        )

    def scale(self, factor: Tensor) -> None:
        self._flat.mul_(factor)
