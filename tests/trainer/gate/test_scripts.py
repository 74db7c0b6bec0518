"""Scripts of a text, against what the Unicode names of its letters say."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter

import pytest

from trainer.gate.scripts import BLOCKS, count_scripts, main_script

# First word of a letter's Unicode name -> the script that it is counted under.
NAMES = {
    "LATIN": "Latin",
    "GREEK": "Greek",
    "CYRILLIC": "Cyrillic",
    "HEBREW": "Hebrew",
    "ARABIC": "Arabic",
    "DEVANAGARI": "Devanagari",
    "THAI": "Thai",
    "HANGUL": "Hangul",
    "HIRAGANA": "Kana",
    "KATAKANA": "Kana",
    "CJK": "Han",
}
TEXTS = [
    "The quick brown fox, 12 times!",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过了懒狗",
    "いろはにほへと チリヌルヲ 漢字",
    "다람쥐 헌 쳇바퀴에 타고파",
    "עטלף אבק נס דרך",
    "نص حكيم له سر قاطع",
    "ऋषियों को सताने वाले",
    "เป็นมนุษย์สุดประเสริฐ",
    "naïve Façade Größe résumé",
]


@pytest.mark.parametrize("text", TEXTS)
def test_letters_are_counted_under_the_script_of_their_name(text: str) -> None:
    exact = Counter(
        NAMES[unicodedata.name(c).split()[0]] for c in text if unicodedata.category(c)[0] in "LM"
    )

    assert count_scripts(text) == exact
    assert main_script(count_scripts(text)) == exact.most_common(1)[0][0]


def test_a_text_without_letters_has_no_script() -> None:
    assert count_scripts("1 + 1 = 2 \U0001f600 \ud800") == {}
    assert main_script({}) == "none"


def test_the_blocks_are_in_order_and_apart() -> None:
    points = [point for first, last, _name in BLOCKS for point in (first, last)]

    assert points == sorted(points)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(BLOCKS))
