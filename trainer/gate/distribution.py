"""How often each whole number occurred: exact, in memory that does not grow with the count.

Filled by tally.py; its facts stand in the report and are drawn by page.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_workers.contract.records import Json

LONGEST = 1 << 17  # tokens; what is more counts as that
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def _counts() -> npt.NDArray[np.int64]:
    return np.zeros(LONGEST + 1, np.int64)


@dataclass(slots=True)
class Distribution:
    """Of numbers from 0 on."""

    counts: npt.NDArray[np.int64] = field(default_factory=_counts)
    num: int = 0
    total: int = 0

    def add(self, value: int) -> None:
        """Count one in."""
        self.counts[min(value, LONGEST)] += 1
        self.num += 1
        self.total += value

    def facts(self) -> Json:
        """Mean, quantiles, and counts in bins of powers of two; bare where nothing was counted."""
        if not self.num:
            return {"num": 0, "bins": {}}
        reached = np.cumsum(self.counts)
        at = {f"p{q * 100:.0f}": int(np.searchsorted(reached, q * self.num)) for q in _QUANTILES}
        largest = int(np.flatnonzero(self.counts)[-1])
        mean = round(self.total / self.num, 1)
        return {"num": self.num, "mean": mean, **at, "max": largest, "bins": self._bins(largest)}

    def _bins(self, largest: int) -> dict[str, int]:
        """From the first bin that holds something to the last."""
        bins = {"0": int(self.counts[0])}
        low = 1
        while low <= largest:
            high = 2 * low - 1
            bins[str(low) if low == high else f"{low}-{high}"] = int(
                self.counts[low : high + 1].sum()
            )
            low = 2 * low
        filled = [name for name, count in bins.items() if count]
        names = list(bins)
        return {name: bins[name] for name in names[names.index(filled[0]) :]}
