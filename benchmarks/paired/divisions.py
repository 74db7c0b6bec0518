"""How the ranks of a part are divided, and what the parts are called.

Read by the modules beside this one. Invariant: the first part is a single rank, which all others
are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.online.topology import TopologyRecipe


@dataclass(frozen=True, slots=True)
class Division:
    """Targets and drafters; without targets each rank is both."""

    num_targets: int
    num_drafters: int

    @property
    def num_ranks(self) -> int:
        return self.num_targets + self.num_drafters

    @property
    def name(self) -> str:
        """As in the names of figures."""
        if not self.num_targets:
            return f"colocated_{self.num_drafters}"
        return f"paired_{self.num_targets}_{self.num_drafters}"

    @property
    def recipe(self) -> TopologyRecipe:
        return TopologyRecipe(num_targets=self.num_targets)


ALONE = Division(0, 1)


def divisions(num_gpus: int) -> list[Division]:
    """All that are measured, those that matter most first."""
    half = num_gpus // 2
    paired = [Division(n, num_gpus - n) for n in range(1, num_gpus) if n != half]
    colocated = [Division(0, n) for n in (num_gpus, half) if n > 1]
    return [ALONE, Division(half, half), *colocated, *paired]
