"""Engines that were measured, by name, as a pace and limits.

Chosen by `--preset`; calibration.py holds what comes out of them against their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulated.pace import Drafter, Pace, Prefill


@dataclass(frozen=True, slots=True)
class Preset:
    """One engine on one accelerator."""

    pace: Pace
    max_running: int
    kv_tokens: int  # 0: no limit was met
    source: str


# Chosen so that waves of equal requests (128 prompt tokens, 256 new ones), read in and decoded as
# schedule.py does it, take what they took at 1, 48, 128, 256 and 512 streams. Graphs were captured
# up to 256 requests; a larger batch is launched kernel by kernel, which takes as long for one as
# for another.
_SMOLLM2 = Pace(
    steps=(
        (1, 2.152e-3),
        (48, 2.509e-3),
        (128, 3.027e-3),
        (256, 3.991e-3),
        (257, 30.83e-3),
        (512, 30.83e-3),
    ),
    prefill=Prefill(
        tokens_per_s=1e6,  # not measured: a quarter of what the matrices alone would allow
        base_s=23.7e-3,  # time to the first token of a prompt in the cache, one stream
    ),
)

PRESETS = {
    "h200_smollm2": Preset(
        pace=_SMOLLM2,
        max_running=512,
        kv_tokens=0,
        source="SmolLM2-135M in bf16, SGLang 0.5.17, triton attention, one H200, November 2026",
    ),
}

# DFlash with a random drafter of two layers, block 8, on that engine, at 1 and at 48 streams:
# nothing is accepted but the verified token itself.
DRAFTERS = {
    "h200_smollm2_random": Drafter(
        accept_length=1.0, step_cost=2.196, step_cost_per_request=3.5e-3
    ),
}
