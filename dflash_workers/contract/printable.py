"""Text from elsewhere, made fit for a terminal and for a line of a log.

Names of files, ids and what an engine said are written by others: a control character in them would
move the cursor, set a window's title or begin a line that looks like ours.
"""

from __future__ import annotations

import re

# Control characters but line end and tab, and those that turn the direction of what follows.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """With escapes in place of what can't be seen."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
