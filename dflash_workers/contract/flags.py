"""What may be wrong with an answer: one name per fault, and the detectors that find it.

Shared by the workers (which note it at the source) and the data gate (which counts it), so that
both mean the same by a word.
"""

from __future__ import annotations

from collections.abc import Sequence

TRUNCATED = "truncated"  # ended by the length limit
EMPTY = "empty"  # no content, no tool call
UNFINISHED_THINKING = "unfinished_thinking"  # the end marker never came
REPETITION = "repetition"  # the tail is one phrase over and over
TOOL_RESULT_MISSING = "tool_result_missing"  # called a tool that has no recorded result
TOOL_ROUNDS = "tool_rounds"  # stopped: too many rounds of tool calls
CONTEXT_FULL = "context_full"  # stopped: a later turn no longer fits the context

MIN_REPEATS = 6
MAX_PERIOD = 32


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether the ids end in one phrase of at most MAX_PERIOD ids, MIN_REPEATS times or more."""
    return any(_repeats(ids, period) >= MIN_REPEATS for period in range(1, MAX_PERIOD + 1))


def _repeats(ids: Sequence[int], period: int) -> int:
    end = len(ids)
    phrase = ids[end - period : end]
    count = 0
    while end >= period and ids[end - period : end] == phrase:
        count += 1
        end -= period
    return count
