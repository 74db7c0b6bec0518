"""Links to files outside docs/ become plain paths in the site, which has no repository beside it.

Called by mkdocs for each page. A link that leads nowhere at all is left for mkdocs to complain of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text as mkdocs shall read it."""
    return _LINK.sub(_plain, markdown)


def _plain(link: re.Match[str]) -> str:
    words, path = link[1], link[2]
    if not (ROOT / path).exists():
        return link[0]
    return f"{words} (`{path}`)" if path not in words else f"`{path}`"
