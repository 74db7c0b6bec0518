"""When each worker had a batch, from commits: what a run's GPUs did, and what they cost.

Fed by progress and by the report with each commit once, in any order. A worker has several batches
at once, so its spans are joined; a short gap between two is joined as well, because the GPU is paid
for meanwhile. Time in which a worker committed nothing is not known from commits and not counted:
the sum is a lower bound of what is billed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from dflash_workers.contract.records import Commit

GAP_S = 120.0


@dataclass(slots=True)
class BusyTime:
    """Of all workers of a run."""

    spans: dict[str, list[list[float]]] = field(default_factory=dict)  # worker -> [from, to], s
    num_gpus: dict[str, int] = field(default_factory=dict)  # worker -> of its engine

    def add(self, commit: Commit) -> None:
        """A commit's time on its worker."""
        from_s = min(commit.started_at, commit.finished_at)
        tp_size = commit.engine.get("tp_size")
        num_gpus = tp_size if isinstance(tp_size, int) and tp_size > 0 else 1
        self.num_gpus[commit.worker] = max(self.num_gpus.get(commit.worker, 1), num_gpus)
        _join(self.spans.setdefault(commit.worker, []), from_s, commit.finished_at)

    def gpu_hours(self) -> float:
        """Of all workers together."""
        seconds = (
            self.num_gpus[worker] * sum(to_s - from_s for from_s, to_s in spans)
            for worker, spans in self.spans.items()
        )
        return sum(seconds) / 3600


def _join(spans: list[list[float]], from_s: float, to_s: float) -> None:
    """Put it among spans that are in order and more than a gap apart, and keep them so."""
    first = bisect_left(spans, from_s - GAP_S, key=lambda span: span[1])
    last = first
    while last < len(spans) and spans[last][0] <= to_s + GAP_S:
        last += 1
    met = spans[first:last]
    spans[first:last] = [[min([from_s, *(s[0] for s in met)]), max([to_s, *(s[1] for s in met)])]]
