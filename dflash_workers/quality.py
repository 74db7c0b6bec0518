"""What is wrong with an answer, noted at the source: keep it and flag it.

Called by rollout for each new answer; the names and detectors are the contract's (flags.py), so
that the data gate counts what was flagged here.
"""

from __future__ import annotations

from dflash_workers.contract.chat import ParsedAnswer
from dflash_workers.contract.flags import (
    EMPTY,
    REPETITION,
    TRUNCATED,
    UNFINISHED_THINKING,
    is_repetitive,
)

STOP = "stop"
LENGTH = "length"


def flags_of(
    output_ids: list[int], finish_reason: str, parsed: ParsedAnswer, *, is_thinking: bool
) -> list[str]:
    """The answer's flags. `is_thinking`: its thinking began and never ended."""
    sampled = output_ids[:-1] if finish_reason == STOP else output_ids  # without the stop id
    found = {
        TRUNCATED: finish_reason == LENGTH,
        EMPTY: not parsed.content and not parsed.tool_calls,
        UNFINISHED_THINKING: is_thinking,
        REPETITION: is_repetitive(sampled),
    }
    return [flag for flag, holds in found.items() if holds]
