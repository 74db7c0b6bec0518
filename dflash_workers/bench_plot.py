"""A sweep as a picture: tokens a second and the wait for the first token, over requests in flight.

Called by cli_bench with a BenchResult. Needs matplotlib, which nothing else here does: an optional
extra, whose absence is said and costs no figure.
"""

from __future__ import annotations

from pathlib import Path

from dflash_workers.bench_result import BenchResult
from dflash_workers.contract.errors import Missing

INSTALL = "pip install 'dflash-fleet[plot]'"
_INCHES = (8.0, 5.0)
_DPI = 120


def draw(result: BenchResult, path: Path) -> Path:
    """Write the PNG and return its path. Raises Missing without matplotlib."""
    try:
        # A second to import, and absent where nobody draws.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Missing(f"no plot without matplotlib: {INSTALL}") from error
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    rates, waits = figure.subplots(2, 1, sharex=True)
    in_flight = [point.in_flight for point in result.points]
    rates.plot(in_flight, [point.tokens_per_s for point in result.points], marker="o")
    proposed = result.proposed()
    rates.axvline(proposed.in_flight, linestyle="--", label=f"proposed: {proposed.in_flight}")
    if collapse := result.collapse():
        label = f"collapsed: {collapse.in_flight}"
        rates.axvline(collapse.in_flight, linestyle=":", color="red", label=label)
    rates.set(ylabel="output tokens/s", title=f"run {result.run}")
    rates.legend()
    for name, values in {
        "median": [point.ttft_p50_s for point in result.points],
        "99th percentile": [point.ttft_p99_s for point in result.points],
    }.items():
        known = [(n, v) for n, v in zip(in_flight, values, strict=True) if v is not None]
        waits.plot([n for n, _ in known], [v for _, v in known], marker="o", label=name)
    waits.set(
        xlabel="requests in flight", ylabel="first token after, s", xscale="log", yscale="log"
    )
    waits.set_xticks(in_flight, [f"{n}" for n in in_flight], minor=False)
    waits.tick_params(axis="x", which="minor", bottom=False)
    waits.legend()
    figure.savefig(path, dpi=_DPI)
    return path
