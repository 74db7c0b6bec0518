"""Curves over time and spans of workers, as inline SVG that needs no script and no asset.

Used by page.py, beside the histograms and bars of gate/plots.py. Axes say their largest and
smallest values in words, because a curve alone says little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.gate.document import escaped

STYLE = """
polyline { fill: none; stroke-width: 1.6; } .c0 { stroke: var(--bar); } .c1 { stroke: var(--bad); }
.c2 { stroke: var(--good); } .c3 { stroke: var(--think); } line { stroke: var(--line); }
rect.k0 { fill: var(--bar); } rect.k1 { fill: var(--bad); } rect.k2 { fill: var(--good); }
rect.k3 { fill: var(--think); } svg circle.died { fill: var(--bad); }
svg circle.joined { fill: var(--good); } svg circle.left, svg circle.replaced { fill: var(--warn); }
figure.wide { grid-column: 1 / -1; }
"""

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP = 420, 200, 52, 42, 8
_SPAN_WIDTH, _NAMES, _ROW = 900, 170, 18
_MAX_POINTS = 600  # of a curve: more can't be told apart
_MAX_ROWS = 60

Points = Sequence[tuple[float, float]]


def curves(title: str, series: Mapping[str, Points], x_unit: str, note: str = "") -> str:
    """One or more curves on common axes that begin at zero; empty ones are left out."""
    shown = {name: _thinned(points) for name, points in series.items() if points}
    if not shown:
        return _figure(title, "", note or "nothing was told")
    all_points = [point for points in shown.values() for point in points]
    x_min, x_max = min(x for x, _ in all_points), max(x for x, _ in all_points)
    y_max = max(max(y for _, y in all_points), 1e-9)
    parts = [*_axes(x_min, x_max, y_max, x_unit)]
    for number, points in enumerate(shown.values()):
        places = " ".join(f"{_across(x, x_min, x_max):.1f},{_up(y, y_max):.1f}" for x, y in points)
        parts.append(f'<polyline class="c{number % 4}" points="{places}"/>')
    parts += _legend(list(shown)) if len(shown) > 1 else []
    return _figure(title, _svg(_WIDTH, _HEIGHT, parts), note)


def spans(
    title: str,
    rows: Mapping[str, Sequence[tuple[float, float]]],
    marks: Mapping[str, Sequence[tuple[float, str]]],
    to: float,
    note: str = "",
) -> str:
    """A line per worker: when it had work, and what happened to it. Times in hours up to `to`."""
    names = sorted({*rows, *marks})
    if not names:
        return _figure(title, "", note or "nobody worked", "wide")
    room, parts = _SPAN_WIDTH - _NAMES - 10, list[str]()
    for at, name in enumerate(names[:_MAX_ROWS]):
        top = at * _ROW
        parts.append(f'<text x="0" y="{top + 13}">{escaped(name[-26:])}</text>')
        for begin, end in rows.get(name, ()):
            x, width = _NAMES + room * begin / to, max(room * (end - begin) / to, 1)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}">'
                f"<title>{escaped(name)}: {begin:.2f} to {end:.2f} h</title></rect>"
            )
        for when, kind in marks.get(name, ()):
            x = _NAMES + room * min(max(when, 0), to) / to
            parts.append(
                f'<circle class="{escaped(kind)}" cx="{x:.1f}" cy="{top + _ROW / 2}" r="4">'
                f"<title>{escaped(name)} {escaped(kind)} at {when:.2f} h</title></circle>"
            )
    height = _ROW * min(len(names), _MAX_ROWS) + 18
    parts.append(f'<text class="dim" x="{_NAMES}" y="{height - 3}">0 h</text>')
    place = f'x="{_SPAN_WIDTH - 10}" y="{height - 3}" text-anchor="end"'
    parts.append(f'<text class="dim" {place}>{to:.2f} h</text>')
    more = (
        f" {len(names) - _MAX_ROWS} more workers are not drawn." if len(names) > _MAX_ROWS else ""
    )
    return _figure(title, _svg(_SPAN_WIDTH, height, parts), note + more, "wide")


def _thinned(points: Points) -> Points:
    step = -(-len(points) // _MAX_POINTS)
    return [*points[::step], *([points[-1]] if (len(points) - 1) % step else [])]


def _across(x: float, x_min: float, x_max: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 8) * (x - x_min) / max(x_max - x_min, 1e-9)


def _up(y: float, y_max: float) -> float:
    return _HEIGHT - _FOOT - (_HEIGHT - _FOOT - _TOP) * max(y, 0.0) / y_max


def _axes(x_min: float, x_max: float, y_max: float, x_unit: str) -> list[str]:
    bottom, right, beside = _HEIGHT - _FOOT, _WIDTH - 8, _LEFT - 5
    return [
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<line x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{bottom}"/>',
        f'<text class="dim" x="{beside}" y="{_TOP + 8}" text-anchor="end">{_short(y_max)}</text>',
        f'<text class="dim" x="{beside}" y="{bottom}" text-anchor="end">0</text>',
        f'<text class="dim" x="{_LEFT}" y="{bottom + 14}">{_short(x_min)} {escaped(x_unit)}</text>',
        f'<text class="dim" x="{right}" y="{bottom + 14}" text-anchor="end">'
        f"{_short(x_max)} {escaped(x_unit)}</text>",
    ]


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x = _LEFT + 10 + number % 2 * 180
        y = _HEIGHT - 6 if number < 2 else _TOP + 10 * (number - 1)
        parts.append(f'<rect class="k{number % 4}" x="{x}" y="{y - 7}" width="9" height="4"/>')
        parts.append(f'<text class="dim" x="{x + 13}" y="{y}">{escaped(name)}</text>')
    return parts


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _figure(title: str, svg: str, note: str, kind: str = "") -> str:
    head = f'<figure class="{kind}"><figcaption>{escaped(title)}</figcaption>'
    return f"{head}{svg}<p>{escaped(note)}</p></figure>"
