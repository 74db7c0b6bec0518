"""Which scripts a text is written in, by Unicode blocks.

Called by tally.py for each answer. Counts letters only: digits, signs and spaces belong to every
script. The table names the blocks that people write in, by the first and last code point of each
(Unicode 16, Blocks.txt); a letter outside them counts as "Other".
"""

from __future__ import annotations

import numpy as np

LATIN, CYRILLIC, HAN, OTHER, NONE = "Latin", "Cyrillic", "Han", "Other", "none"

BLOCKS = (
    (0x0041, 0x005A, LATIN),
    (0x0061, 0x007A, LATIN),
    (0x00AA, 0x00AA, LATIN),
    (0x00BA, 0x00BA, LATIN),
    (0x00C0, 0x00D6, LATIN),
    (0x00D8, 0x00F6, LATIN),
    (0x00F8, 0x024F, LATIN),
    (0x0250, 0x02AF, OTHER),  # phonetic
    (0x0370, 0x03FF, "Greek"),
    (0x0400, 0x052F, CYRILLIC),
    (0x0530, 0x058F, "Armenian"),
    (0x0590, 0x05FF, "Hebrew"),
    (0x0600, 0x06FF, "Arabic"),
    (0x0700, 0x074F, OTHER),
    (0x0750, 0x077F, "Arabic"),
    (0x0780, 0x08FF, OTHER),
    (0x0900, 0x097F, "Devanagari"),
    (0x0980, 0x09FF, "Bengali"),
    (0x0A00, 0x0A7F, "Gurmukhi"),
    (0x0A80, 0x0AFF, "Gujarati"),
    (0x0B80, 0x0BFF, "Tamil"),
    (0x0C00, 0x0C7F, "Telugu"),
    (0x0C80, 0x0CFF, "Kannada"),
    (0x0D00, 0x0D7F, "Malayalam"),
    (0x0D80, 0x0DFF, OTHER),
    (0x0E00, 0x0E7F, "Thai"),
    (0x0E80, 0x109F, OTHER),
    (0x10A0, 0x10FF, "Georgian"),
    (0x1100, 0x11FF, "Hangul"),
    (0x1200, 0x139F, "Ethiopic"),
    (0x13A0, 0x1DBF, OTHER),
    (0x1E00, 0x1EFF, LATIN),
    (0x1F00, 0x1FFF, "Greek"),
    (0x3040, 0x309F, "Kana"),
    (0x30A0, 0x30FF, "Kana"),
    (0x3130, 0x318F, "Hangul"),
    (0x31F0, 0x31FF, "Kana"),
    (0x3400, 0x4DBF, HAN),
    (0x4E00, 0x9FFF, HAN),
    (0xA000, 0xABFF, OTHER),
    (0xAC00, 0xD7AF, "Hangul"),
    (0xF900, 0xFAFF, HAN),
    (0xFB50, 0xFDFF, "Arabic"),
    (0xFE70, 0xFEFF, "Arabic"),
    (0xFF21, 0xFF3A, LATIN),
    (0xFF41, 0xFF5A, LATIN),
    (0xFF66, 0xFF9F, "Kana"),
    (0x10000, 0x1CFFF, OTHER),
    (0x20000, 0x323AF, HAN),
)
_FIRSTS = np.array([first for first, _last, _name in BLOCKS], np.uint32)
_LASTS = np.array([last for _first, last, _name in BLOCKS], np.uint32)


def count_scripts(text: str) -> dict[str, int]:
    """Letters of the text by script."""
    points = np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32)
    blocks = np.searchsorted(_FIRSTS, points, side="right") - 1
    inside = (blocks >= 0) & (points <= _LASTS[blocks])
    counts: dict[str, int] = {}
    for block, count in enumerate(np.bincount(blocks[inside], minlength=len(BLOCKS)).tolist()):
        if count:
            name = BLOCKS[block][2]
            counts[name] = counts.get(name, 0) + count
    return counts


def main_script(counts: dict[str, int]) -> str:
    """The script of most letters; "none" where there are no letters."""
    return max(counts, key=lambda name: (counts[name], name), default=NONE)
