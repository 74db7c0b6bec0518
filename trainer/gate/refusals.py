"""Whether an answer declines what it was asked.

Called by tally.py for each answer's content, without its thinking. Looks at the first sentence or
two, where refusals say so; a text that quotes one further down is none. Known are the usual words
of instruction-tuned models in English and the same in five other languages: a count for people to
look at, and no verdict hangs on it.
"""

from __future__ import annotations

import re

HEAD_CHARS = 240  # where a refusal says that it is one

_APOLOGY = r"(?:i(?:'m| am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately)"
_CANNOT = (
    r"i(?:'m| am) (?:not able|unable)|i (?:can(?:'t|not| not)|won't|will not|must decline)|"
    r"i(?:'m| am) not (?:allowed|permitted|comfortable)"
)
_HELP = (
    r"(?:to )?(?:help|assist|provide|comply|fulfil|create|write|generate|answer|discuss|engage|"
    r"share|give|support|do (?:that|this)|with (?:that|this))"
)
_REFUSAL = re.compile(
    rf"(?:^|[.!,;:\n]\s*|{_APOLOGY}[^.!?\n]{{0,40}}?)(?:{_CANNOT})\s+{_HELP}\b"
    r"|^\s*as an? (?:ai|artificial intelligence|language model)\b[^.!?\n]{0,60}?"
    r"\bi (?:can(?:'t|not| not)|do(?:n't| not) (?:have|feel)|won't|am (?:not able|unable))"
    r"|^\s*(?:lo siento|je suis désolé|es tut mir leid|mi dispiace|sinto muito)"
    r"[^.!?\n]{0,40}?\b(?:no puedo|ne peux pas|kann ich|ich kann|non posso|não posso)\b"
    r"|^\s*(?:很?抱歉|对不起)[^。!?\n]{0,20}(?:不能|无法)",
    re.IGNORECASE,
)


def is_refusal(content: str) -> bool:
    """Whether the content's beginning declines."""
    return bool(_REFUSAL.search(content[:HEAD_CHARS].replace("\u2019", "'")))
