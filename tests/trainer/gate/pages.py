"""Pages as a browser would read them: which elements there are, and that none of them acts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Elements(HTMLParser):
    """Every element with its attributes; `is_balanced` once all that were opened are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.is_balanced = True
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.is_balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    elements.close()
    return elements


def assert_harmless(page: str) -> None:
    """Loads nothing, runs nothing, shows no control character."""
    elements = parsed(page)
    assert elements.is_balanced
    assert elements.open == []
    names = {tag for tag, _attrs in elements.seen}
    assert not names & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    loaded = {"src", "href", "srcset", "data", "action", "background", "xlink:href"}
    for _tag, attrs in elements.seen:
        assert not loaded & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", page)
