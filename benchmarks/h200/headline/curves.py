"""Curves of acceptance: by training step, and by how much data there was.

Drawn by findings.py out of the trainers' metrics.jsonl; what is drawn was measured on held-out
answers, each one walked along as decoding would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import orjson
from matplotlib.figure import Figure as Canvas

mpl.use("Agg")

ACCEPT_LABEL = "tokens per verify step, held-out answers"


@dataclass(frozen=True, slots=True)
class Curve:
    """Where a drafter was measured as it trained, and what it was worth."""

    steps: list[int] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)


def read_curve(metrics: Path) -> Curve:
    """The measured points of a metrics.jsonl."""
    curve = Curve()
    for line in metrics.read_bytes().splitlines():
        record = orjson.loads(line)
        if record["measured_accept_length"] is not None:
            curve.steps.append(record["step"])
            curve.accept_lengths.append(record["measured_accept_length"])
    return curve


def draw_curves(curves: dict[str, Curve], path: Path) -> None:
    """A line per drafter."""
    canvas = Canvas(figsize=(8, 5), layout="constrained")
    axes = canvas.subplots()
    for name, curve in curves.items():
        axes.plot(curve.steps, curve.accept_lengths, marker=".", label=name)
    axes.set_xlabel("training steps")
    axes.set_ylabel(ACCEPT_LABEL)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path, dpi=120)


def draw_scaling(by_size: dict[int, Curve], path: Path) -> None:
    """The last point of each, by samples; all of them trained as many steps."""
    sizes = sorted(by_size)
    canvas = Canvas(figsize=(6, 4), layout="constrained")
    axes = canvas.subplots()
    axes.plot(sizes, [by_size[size].accept_lengths[-1] for size in sizes], marker="o")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(f"completions trained on, {by_size[sizes[0]].steps[-1]:,} steps each")
    axes.set_ylabel(ACCEPT_LABEL)
    axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=120)
