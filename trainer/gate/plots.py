"""Counts as pictures: inline SVG that needs no script and no asset.

Called by page.py. Numbers are written beside what is drawn, because a bar alone says little.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.gate.document import escaped

_WIDTH, _HEIGHT = 420, 190
_FOOT = 58  # below the bars, for labels
_HEAD = 4  # above them
_ROW = 20  # height of a category
_LABELS = 150  # width of the categories' names
_NAME_CHARS = 22


def histogram(title: str, bins: Mapping[str, int], note: str = "") -> str:
    """Upright bars, one per bin, in the order given."""
    highest = max(bins.values(), default=0)
    if not highest:
        return _figure(title, "", note or "nothing to count")
    step = _WIDTH / len(bins)
    room = _HEIGHT - _FOOT - _HEAD
    parts = []
    for at, (label, count) in enumerate(bins.items()):
        height = room * count / highest
        left, top = at * step, _HEAD + room - height
        middle = left + step / 2
        parts.append(
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{escaped(label)}: {count:,}</title></rect>'
            f'<text class="dim" x="{middle:.1f}" y="{_HEIGHT - _FOOT + 12}" text-anchor="end" '
            f'transform="rotate(-35 {middle:.1f} {_HEIGHT - _FOOT + 12})">{escaped(label)}</text>'
        )
    return _figure(title, _svg(_HEIGHT, parts), note)


def bars(title: str, counts: Mapping[str, int], note: str = "", most: int = 12) -> str:
    """Lying bars, one per category, the largest first; `most` of them, the others as one."""
    total = sum(counts.values())
    if not total:
        return _figure(title, "", note or "nothing to count")
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    if len(ordered) > most:
        rest = sum(count for _name, count in ordered[most:])
        ordered = [*ordered[:most], (f"{len(ordered) - most} others", rest)]
    highest = max(count for _name, count in ordered)
    room = _WIDTH - _LABELS - 90
    parts = []
    for at, (name, count) in enumerate(ordered):
        top, width = at * _ROW, room * count / highest
        short = name if len(name) <= _NAME_CHARS else "…" + name[1 - _NAME_CHARS :]
        parts.append(
            f'<text x="0" y="{top + 14}">{escaped(short)}<title>{escaped(name)}</title></text>'
            f'<rect x="{_LABELS}" y="{top + 3}" width="{max(width, 1):.1f}" height="{_ROW - 6}">'
            f"<title>{escaped(name)}: {count:,}</title></rect>"
            f'<text class="dim" x="{_LABELS + width + 5:.1f}" y="{top + 14}">'
            f"{count:,} ({count / total:.1%})</text>"
        )
    return _figure(title, _svg(_ROW * len(ordered), parts), note)


def _svg(height: int, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _figure(title: str, svg: str, note: str) -> str:
    return f"<figure><figcaption>{escaped(title)}</figcaption>{svg}<p>{escaped(note)}</p></figure>"
