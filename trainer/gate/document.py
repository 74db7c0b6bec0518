"""A self-contained HTML document, and text that is safe and readable in one or on a terminal.

Used by page.py (the gate's report) and tokens/show.py (one sample). Invariant: a document loads
nothing and runs nothing, whatever the data say: no script, no asset, every text escaped, and a
policy in its head that makes browsers hold to that.
"""

from __future__ import annotations

import html
import re

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #6b7280; --paper: #fff; --line: #d8dce2;
  --bar: #3b6fb6; --good: #1b7f4b; --bad: #b3261e; --warn: #946200; --think: #7a4fb5;
  --tool: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #949ba6; --paper: #15181c;
  --line: #343a43; --bar: #7aa7e6; --good: #5ac98c; --bad: #ff8a80; --warn: #e0b050;
  --think: #c3a2f2; --tool: #58c4d8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pass { color: var(--good); } .fail { color: var(--bad); font-weight: 600; }
.overridden { color: var(--warn); font-weight: 600; } .not-judged { color: var(--dim); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; overflow: visible; }
svg rect { fill: var(--bar); } svg text { fill: var(--ink); font-size: 11px; }
svg text.dim { fill: var(--dim); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
"""

# Spaces, marks and orders that a reader doesn't see, and that may turn round what he does see.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_PICTURES = 0x2400  # the block of pictures for control characters, in their order
_DELETE = 0x7F


def document(title: str, body: str, style: str = "") -> str:
    """The whole document. `body` is HTML, whose texts went through `escaped`."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}{style}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def escaped(text: str, *, keep_lines: bool = False) -> str:
    """For an element or a quoted attribute; see `visible`."""
    return html.escape(visible(text, keep_lines=keep_lines))


def visible(text: str, *, keep_lines: bool = False) -> str:
    """The text with a picture or the number in place of what can't be seen.

    `keep_lines`: a line end shows as such and ends the line, too.
    """
    shown = _HIDDEN.sub(_picture, text)
    return shown.replace("␊", "␊\n") if keep_lines else shown


def _picture(found: re.Match[str]) -> str:
    point = ord(found[0])
    if point < 0x20:
        return chr(_PICTURES + point)
    return "␡" if point == _DELETE else f"⟨U+{point:04X}⟩"
