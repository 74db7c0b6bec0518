"""A campaign as pictures: inline SVG, by matplotlib, that needs no script and no asset.

Called by page.py with a result. Colours stand for the same kind in every picture. Needs matplotlib,
which nothing else of a campaign does.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.campaign.result import KINDS, FaultSeen, ProcessSeen, Series, Stage
from dflash_workers.bench_plot import INSTALL
from dflash_workers.contract.errors import Missing

Axes = Any

_INCHES = (7.2, 3.0)
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "campaign", "font.size": 8, "axes.grid": True}
_COLOURS = [f"C{number}" for number in range(10)]
_NUM_RATES = 120  # in a picture: over shorter times they are noise
_MARK = {"linestyle": "none", "markersize": 3.5, "alpha": 0.7}


def over_time(series: Series, faults: Sequence[FaultSeen] = ()) -> str:
    """A curve; a tick at the top for each fault."""

    def draw(axes: Axes) -> None:
        axes.plot(_minutes(series.t_s), series.value, linewidth=1)
        axes.set(xlabel="minutes", ylabel=series.unit)
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
        for colour, (kind, seen) in zip(_COLOURS[3:] * 9, _by_kind(faults).items(), strict=False):
            top = axes.get_xaxis_transform()  # across in minutes, up as a share of the axes
            when = _minutes(fault.t_s for fault in seen)
            label = f"{kind} ({len(seen)})"
            axes.plot(when, [0.97] * len(when), "|", color=colour, transform=top, label=label)
        if faults:
            _name_beside(axes)

    return _svg(draw)


def recoveries(faults: Sequence[FaultSeen]) -> str:
    """When a batch was cut, and how long it took until it went on."""

    def draw(axes: Axes) -> None:
        for colour, (kind, seen) in zip(_COLOURS * 9, _by_kind(faults).items(), strict=False):
            points = [(fault.t_s / 60, s) for fault in seen for s in fault.recovery_s]
            if points:
                across, up = zip(*points, strict=True)
                axes.plot(across, up, "o", color=colour, label=kind, **_MARK)
        axes.set(xlabel="minutes", ylabel="s until the next new token")
        axes.set_ylim(bottom=0)
        _name_beside(axes)

    return _svg(draw)


def memory(processes: Sequence[ProcessSeen]) -> str:
    """A curve for each process that was seen, in the colour of its kind."""

    def draw(axes: Axes) -> None:
        named: set[str] = set()
        for one in processes:
            label = "" if one.kind in named else one.kind
            named.add(one.kind)
            colour = _COLOURS[KINDS.index(one.kind)]
            across = _minutes(one.rss.t_s)
            axes.plot(across, one.rss.value, linewidth=1, color=colour, label=label)
        axes.set(xlabel="minutes", ylabel="MB resident")
        axes.set_ylim(bottom=0)
        _name_beside(axes)

    return _svg(draw)


def cores(used: Sequence[Series]) -> str:
    """CPU seconds so far of each kind ("cpu.<kind>", all at the same times), as cores kept busy."""

    def draw(axes: Axes) -> None:
        kinds = [one.name.partition(".")[2] for one in used]
        colours = [_COLOURS[KINDS.index(kind)] for kind in kinds]
        across, up = _minutes(_thinned(used[0].t_s)[1:]), [_rate(one) for one in used]
        axes.stackplot(across, up, labels=kinds, colors=colours, linewidth=0)
        axes.set(xlabel="minutes", ylabel="cores busy")
        _name_beside(axes)

    return _svg(draw)


def stages(costs: Sequence[Stage]) -> str:
    """A bar for what each kind cost a prompt."""

    def draw(axes: Axes) -> None:
        colours = [_COLOURS[KINDS.index(stage.kind)] for stage in costs]
        bars = axes.barh(
            [stage.kind for stage in costs],
            [stage.cpu_ms_per_prompt for stage in costs],
            height=0.6,
            color=colours,
        )
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.margins(x=0.1)
        axes.set(xlabel="ms of CPU a prompt")
        axes.invert_yaxis()

    return _svg(draw)


def _rate(used: Series) -> list[float]:
    """Seconds of CPU a second, between each two times that are shown."""
    at_s, cpu_s = _thinned(used.t_s), _thinned(used.value)
    spans = zip(at_s, at_s[1:], cpu_s, cpu_s[1:], strict=False)
    return [(after - before) / max(end - begin, 1e-9) for begin, end, before, after in spans]


def _thinned(values: Sequence[float]) -> Sequence[float]:
    return values[:: max(len(values) // _NUM_RATES, 1)]


def _by_kind(faults: Iterable[FaultSeen]) -> dict[str, list[FaultSeen]]:
    kinds: dict[str, list[FaultSeen]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return dict(sorted(kinds.items()))


def _minutes(at_s: Iterable[float]) -> list[float]:
    return [second / 60 for second in at_s]


def _name_beside(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=7)


def _svg(draw: Callable[[Axes], None]) -> str:
    """The element alone: what a file of its own has before it has no place in a page.

    Raises Missing without matplotlib.
    """
    try:
        # A second to import, and absent where nobody draws.
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Missing(f"no pictures without matplotlib: {INSTALL}") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]
