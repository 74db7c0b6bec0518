"""How long work takes on a GPU, and in which kernels.

Used by the programs beside it, on callables that start GPU work and wait for none of it. Times are
the GPU's own, by events, so that what the host does while the GPU is busy costs nothing, as in
training; what keeps the GPU waiting does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

NUM_NAMED = 10  # of the longest kernels
MATRIX_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma")  # parts of cuBLAS' kernel names


def times_ms(works: Sequence[Callable[[], object]]) -> list[float]:
    """GPU time from the end of each to the end of the next; as in training, none is waited for."""
    event_type: Any = torch.cuda.Event  # untyped
    events = [event_type(enable_timing=True) for _ in range(len(works) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for work, event in zip(works, events[1:], strict=True):
        work()
        event.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(events)]


def kernel_times(step: Callable[[], None]) -> dict[str, float]:
    """GPU milliseconds of one step by kind, and of the longest kernels by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda r: -r.self_device_time_total)
    kinds: dict[str, float] = {}
    for row in rows:
        kind = kernel_kind(row.key)
        kinds[kind] = kinds.get(kind, 0.0) + row.self_device_time_total / 1000
    longest = rows[:NUM_NAMED]
    return kinds | {f"`{r.key[:60]}` x{r.count}": r.self_device_time_total / 1000 for r in longest}


def kernel_kind(name: str) -> str:
    if "flex" in name:
        return "attention (flex)"
    if any(word in name for word in MATRIX_PRODUCTS):
        return "matrix products"
    return "fused (triton)" if name.startswith("triton") else "other"
