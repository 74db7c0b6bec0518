"""What a GPU costs, as `estimate` was last told for a run, and what its time has cost so far.

Stored by `estimate --gpu`, read by status, exporter and report. Prices are a person's word, never
looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.store import Store


@dataclass(frozen=True, slots=True)
class Price:
    """Of one kind of GPU."""

    gpu: str
    usd_per_hour: float  # of one, on demand


@dataclass(frozen=True, slots=True)
class Prices:
    """`prices.json`."""

    prices: list[Price]
    spot_share: float | None = None  # a spot GPU's price over the one on demand; None: no spot

    def cost_usd(self, gpu_hours: float) -> dict[str, float]:
        """By kind of GPU: what these hours cost if all of them were of that kind."""
        share = 1.0 if self.spot_share is None else self.spot_share
        return {p.gpu: round(gpu_hours * p.usd_per_hour * share, 4) for p in self.prices}


def store_prices(store: Store, run: str, prices: Prices) -> None:
    """Replace what was said before."""
    store.replace(RunKeys(run).prices, dump(prices))


def stored_prices(store: Store, run: str) -> Prices | None:
    """None where nobody has said any. Raises Corrupt."""
    try:
        return load(Prices, store.get(RunKeys(run).prices))
    except Missing:
        return None
