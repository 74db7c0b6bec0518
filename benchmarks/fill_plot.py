"""How full the engine is kept, as a picture: a bar per batch size and number of batches at once.

Called by fill.py with what it measured. Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_workers.bench_plot import INSTALL
from dflash_workers.contract.errors import Missing

_INCHES = (7.0, 4.0)
_DPI = 120


def draw(bars: Sequence[tuple[str, float]], goal: float, path: Path) -> Path:
    """Write the PNG and return its path. `bars`: what was loaded, and how full it was kept.

    Raises Missing without matplotlib.
    """
    try:
        # A second to import, and absent where nobody draws.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Missing(f"no plot without matplotlib: {INSTALL}") from error
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names, shares = zip(*bars, strict=True)
    drawn = axes.barh(names, shares)
    axes.bar_label(drawn, fmt="%.3f", padding=3)
    axes.axvline(goal, linestyle="--", color="black", label=f"goal: {goal:g}")
    axes.set(xlim=(0, 1.1), xlabel="mean running requests over the limit, work being queued")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=_DPI)
    return path
