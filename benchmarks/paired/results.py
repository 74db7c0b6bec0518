"""What the parts have found, as figures.

Read by __main__.py. Pure arithmetic over what parts.py left; what a part didn't leave makes no
figure. Invariant: shares and bounds come from the product's own stopwatch, rates from the leader's
clock around whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from benchmarks.figures import Figure
from benchmarks.paired.divisions import ALONE, Division
from trainer.online.stopwatch import DATA, DRAFTER, OPTIMIZER, TARGET, TRANSFER

Found = Mapping[str, dict[str, Any]]  # by part

WAIT_GOAL = 0.05  # of a drafter's step
BEST_GOAL = 1 / 1.1  # within a tenth of what the slower side needs by itself
DEATH_GOAL_S = 30.0
NOISE_NATS = {True: 0.02, False: 1e-5}  # of losses in bf16 (where there is a GPU), and in fp32
REAL_NOISE_NATS = 0.05  # of the mean loss of the last steps of two trainings in bf16
NUM_LAST = 20  # steps


def figures_of(found: Found, *, is_gpu: bool) -> list[Figure]:
    """All that can be told from what there is."""
    figures: list[Figure] = []
    for name, part in found.items():
        if "ranks" in part:
            figures += _of_division(name, part, found.get(ALONE.name), is_gpu)
    if "death" in found:
        figures += [
            Figure("online.death_ended", found["death"]["ended_s"], DEATH_GOAL_S, "lower", "s"),
            Figure("online.death_resumed_at", found["death"]["resumed_at"], None, "higher", "step"),
        ]
    return figures + list(_of_real(found))


def _of_division(
    name: str, part: dict[str, Any], alone: dict[str, Any] | None, is_gpu: bool
) -> Iterator[Figure]:
    division = Division(part["num_targets"], part["num_drafters"])
    leader = part["ranks"][division.num_targets]
    step_s = fmean(leader["steps_s"])
    rate = sum(leader["num_tokens"]) / sum(leader["steps_s"])
    yield Figure(f"online.{name}_tokens_rate", rate, None, "higher", "tokens/s")
    yield Figure(f"online.{name}_step_ms", step_s * 1000, None, "lower", "ms")
    for role, has_drafter in (("drafter", True), ("target", False)):
        peaks = [r["peak_gib"] for r in part["ranks"] if r["has_drafter"] is has_drafter]
        if is_gpu and peaks:
            yield Figure(f"online.{name}_{role}_memory", max(peaks), None, "lower", "GiB")
    if division.num_targets:
        yield from _of_a_pair(name, division, part["ranks"], is_gpu)
        num_bytes = part["num_microbatches"] * leader["message_bytes"]
        yield Figure(
            f"online.{name}_feature_rate", num_bytes / step_s / 1e9, None, "higher", "GB/s"
        )
    if alone and alone is not part:
        yield from _beside_one(name, division, part, alone, is_gpu)


def _of_a_pair(
    name: str, division: Division, ranks: list[dict[str, Any]], is_gpu: bool
) -> Iterator[Figure]:
    leader, step_s = ranks[division.num_targets], fmean(ranks[division.num_targets]["steps_s"])
    waits = fmean(p[TRANSFER] + p[DATA] for p in leader["phases"]) / step_s
    is_even = division.num_targets == division.num_drafters
    goal = WAIT_GOAL if is_even and is_gpu else None
    prefix = "online" if is_even and is_gpu else f"online.{name}"
    figure = "online.wait_share" if prefix == "online" else f"{prefix}_wait_share"
    yield Figure(figure, waits, goal, "lower", "ratio")
    senders = ranks[: division.num_targets]
    sender_waits = fmean(p[TRANSFER] + p[DATA] for r in senders for p in r["phases"]) / step_s
    yield Figure(f"online.{name}_target_wait_share", sender_waits, None, "lower", "ratio")
    if leader["link_s"]:
        rate = leader["message_bytes"] / leader["link_s"] / 1e9
        yield Figure(f"online.{name}_link_rate", rate, None, "higher", "GB/s")


def _beside_one(
    name: str, division: Division, part: dict[str, Any], alone: dict[str, Any], is_gpu: bool
) -> Iterator[Figure]:
    leader, one = part["ranks"][division.num_targets], alone["ranks"][0]
    # Several ranks leave a step or so later than one does.
    pairs = zip(leader["losses"], one["losses"], strict=False)
    gap = max(abs(a - b) for a, b in pairs)
    yield Figure(f"online.{name}_loss_gap", gap, NOISE_NATS[is_gpu], "lower", "nats")
    speedup = fmean(one["steps_s"]) / fmean(leader["steps_s"])
    yield Figure(f"online.{name}_speedup", speedup, None, "higher", "ratio")
    if division.num_targets:
        best_s = best_step_s(division, one["phases"])
        goal = BEST_GOAL if is_gpu else None
        share = best_s / fmean(leader["steps_s"])
        yield Figure(f"online.{name}_of_best", share, goal, "higher", "ratio")


def best_step_s(division: Division, phases: list[dict[str, float]]) -> float:
    """A step where the slower side never waits: each side's work, divided among its ranks, as one
    GPU did it all.
    """
    target, drafter, optimizer = (fmean(p[n] for p in phases) for n in (TARGET, DRAFTER, OPTIMIZER))
    return max(target / division.num_targets, drafter / division.num_drafters + optimizer)


def _of_real(found: Found) -> Iterator[Figure]:
    one = found.get(f"real_{ALONE.name}")
    for name, part in found.items():
        if not name.startswith("real_"):
            continue
        rate = fmean(part["tokens_per_s"][-NUM_LAST:])
        yield Figure(f"online.{name}_tokens_rate", rate, None, "higher", "tokens/s")
        yield Figure(
            f"online.{name}_last_loss", fmean(part["loss"][-NUM_LAST:]), None, "lower", "nats"
        )
        if one and one is not part:
            gap = abs(fmean(part["loss"][-NUM_LAST:]) - fmean(one["loss"][-NUM_LAST:]))
            yield Figure(f"online.{name}_loss_gap", gap, REAL_NOISE_NATS, "lower", "nats")
