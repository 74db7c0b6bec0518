"""Text in a page or on a terminal: seen, and only seen."""

from __future__ import annotations

import pytest

from tests.trainer.gate.pages import assert_harmless, parsed
from trainer.gate.document import document, escaped, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb", "a␉b"),
        ("a\x1b[31m", "a␛[31m"),
        ("\x7f", "␡"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\ud800", "⟨U+D800⟩"),
        ("\u200b\ufeff", "⟨U+200B⟩⟨U+FEFF⟩"),
        ("é 漢 😀 ok", "é 漢 😀 ok"),
    ],
)
def test_what_can_not_be_seen_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert escaped(text) == shown


def test_line_ends_are_kept_where_asked_for() -> None:
    assert visible("a\nb") == "a␊b"
    assert visible("a\nb\n", keep_lines=True) == "a␊\nb␊\n"


def test_a_document_keeps_its_texts_apart_from_its_elements() -> None:
    text = "<b>&amp;\"'</b>"

    page = document(text, f'<p title="{escaped(text)}">{escaped(text)}</p>')

    assert_harmless(page)
    assert parsed(page).seen[-1] == ("p", {"title": text})
    assert parsed(page).text.count(text) == 2
