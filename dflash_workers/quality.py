"""What is wrong with an answer, noted at the source, and what the run's policy makes of it.

Called by answering for each new answer and, through Watch, while one is still coming; the names and
detectors are the contract's (flags.py), so that the data gate counts what was flagged here. Without
a policy an answer is kept and flagged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_workers.contract.answers import ParsedAnswer
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.flags import (
    EMPTY,
    GARBLED,
    REJECT,
    REPETITION,
    RETRY_ONCE,
    STRAY_MARKER,
    TOOL_CALL_LOOP,
    TRUNCATED,
    UNFINISHED_THINKING,
    has_stray_marker,
    is_calling_on,
    is_garbled,
    is_repetitive,
    is_stuck,
)
from dflash_workers.contract.records import Json

STOP = "stop"
LENGTH = "length"

# Ids. A loop is seen within flags.STUCK_IDS + LOOK_EVERY ids of its start: where the limit is not
# much more than that, looking would save next to nothing.
LOOK_EVERY = 256
LOOK_OVER = 512


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as it was read from its ids."""

    parsed: ParsedAnswer
    text: str  # the whole of it
    shown: str  # its content with the special tokens that it holds


def flags_of(ids: list[int], finish_reason: str, reading: Reading, call_id: int) -> list[str]:
    """The answer's flags. `ids`: without the stop id. `call_id`: see is_calling_on."""
    parsed = reading.parsed
    found = {
        TRUNCATED: finish_reason == LENGTH,
        EMPTY: not parsed.content and not parsed.tool_calls,
        UNFINISHED_THINKING: parsed.is_thinking,
        STRAY_MARKER: has_stray_marker(reading.shown),
        REPETITION: is_repetitive(ids),
        TOOL_CALL_LOOP: is_calling_on(ids, call_id),
        GARBLED: is_garbled(reading.text),
    }
    return [flag for flag, holds in found.items() if holds]


def loop_in(ids: list[int], call_id: int) -> str:
    """The flag for which an answer that is still coming should be stopped; "" where it is none."""
    if is_stuck(ids):
        return REPETITION
    return TOOL_CALL_LOOP if is_calling_on(ids, call_id) else ""


def is_retry_due(flags: Iterable[str], policies: Json) -> bool:
    """Whether the same should be asked once more. What is to be rejected anyway is not."""
    wanted = {policies.get(flag) for flag in flags}
    return RETRY_ONCE in wanted and REJECT not in wanted


def check_kept(flags: Iterable[str], policies: Json) -> None:
    """Raises PromptRejected, with the flag as its reason, where the run rejects such answers."""
    for flag in flags:
        if policies.get(flag) == REJECT:
            raise PromptRejected(flag, "flagged so, and the run's policy is to reject that")
