"""What may be wrong with an answer: a name per fault, the detectors that find it, a run's policies.

Shared by the workers (quality.py notes faults at the source), the data gate (which counts them) and
the producer (which checks a run's policies), so that all mean the same by a word. The detectors are
pure functions over ids or text and take some 10 microseconds for 2,300 ids: nobody needs to skip
them. A flagged answer is kept, unless the run's policy for that flag says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dflash_workers.contract.errors import BadInput

TRUNCATED = "truncated"  # ended by the length limit
EMPTY = "empty"  # no content, no tool call
UNFINISHED_THINKING = "unfinished_thinking"  # the end marker never came
STRAY_MARKER = "stray_marker"  # a control, thinking or tool marker where it means nothing
REPETITION = "repetition"  # the tail is one phrase over and over
TOOL_CALL_LOOP = "tool_call_loop"  # more calls than anybody would make at once
GARBLED = "garbled"  # bytes that are no text, or control characters
ANSWER_FLAGS = (
    TRUNCATED,
    EMPTY,
    UNFINISHED_THINKING,
    STRAY_MARKER,
    REPETITION,
    TOOL_CALL_LOOP,
    GARBLED,
)

TOOL_RESULT_MISSING = "tool_result_missing"  # called a tool that has no recorded result
TOOL_ARGS_DIFFER = "tool_args_differ"  # a recorded result of a call with other arguments was used
TOOL_ROUNDS = "tool_rounds"  # stopped: too many rounds of tool calls
CONTEXT_FULL = "context_full"  # stopped: a later turn no longer fits the context
CONVERSATION_FLAGS = (TOOL_RESULT_MISSING, TOOL_ARGS_DIFFER, TOOL_ROUNDS, CONTEXT_FULL)

# A run's policy per flag. Retrying asks the same once more with another seed and keeps what comes.
KEEP, REJECT, RETRY_ONCE = POLICIES = ("keep", "reject", "retry-once")

# Ids. A phrase may be a word, a sentence or a whole tool call; a short one is often said for a
# good reason (a row of zeros), so it must come more often.
SHORT_PERIOD, MIN_REPEATS = 32, 6
MAX_PERIOD, MIN_LONG_REPEATS = 512, 4
STUCK_IDS = 512  # of nothing but repetition: not even a table of zeros is worth the rest
MAX_CALLS = 32  # in one answer
_NEAR = 8  # ids that tell a period apart from a chance likeness

_REPLACEMENT = "\ufffd"
_MAX_REPLACED = 1 / 200  # of the characters
_CONTROL_BYTES = bytes([*range(9), 11, 12, *range(14, 32), 127])  # but tab and line ends

# Two patterns with a fixed first letter each: that is what makes the search fast.
_MARKERS = (
    re.compile(
        r"<(?:[|｜][\w.▁-]{1,40}[|｜]>|/?(?:think|tool_calls?|tool_response)>|(?:function|parameter)=)"
    ),
    re.compile(r"\[/?(?:INST|THINK|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"),
)


def check_policies(policies: Mapping[str, object]) -> None:
    """A run's `quality`. Raises BadInput for a flag or a policy that there isn't."""
    for flag, policy in policies.items():
        if flag not in ANSWER_FLAGS + CONVERSATION_FLAGS:
            known = ", ".join(ANSWER_FLAGS + CONVERSATION_FLAGS)
            raise BadInput(f"quality: no flag {flag!r}: one of {known}")
        possible = POLICIES if flag in ANSWER_FLAGS else (KEEP, REJECT)
        if policy not in possible:
            raise BadInput(f"quality of {flag!r}: {policy!r} is none of {', '.join(possible)}")


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether the ids end in one phrase said over and over."""
    return any(
        _ends_in_loop(ids, period, period * _min_repeats(period))
        for period in _periods(ids, MAX_PERIOD)
    )


def is_stuck(ids: Sequence[int]) -> bool:
    """Whether so much at the end is repetition that it may be stopped while it goes on."""
    return any(
        _ends_in_loop(ids, period, STUCK_IDS)
        for period in _periods(ids, STUCK_IDS // MIN_LONG_REPEATS)
    )


def is_calling_on(ids: Sequence[int], call_id: int) -> bool:
    """Whether the ids begin more tool calls than MAX_CALLS. `call_id`: the id that begins one."""
    return ids.count(call_id) > MAX_CALLS


def has_stray_marker(text: str) -> bool:
    """Whether content shows a marker. `text`: decoded with its special tokens, but the stop id."""
    return any(marker.search(text) for marker in _MARKERS)


def is_garbled(text: str) -> bool:
    """Whether the text can't be what somebody meant to write.

    An engine whose numbers are no longer finite says one id over and over: see is_repetitive.
    """
    text = text.rstrip(_REPLACEMENT)  # a limit may cut a character in two
    if text.count(_REPLACEMENT) > len(text) * _MAX_REPLACED:
        return True
    raw = text.encode(errors="replace")
    return len(raw.translate(None, _CONTROL_BYTES)) != len(raw)


def _min_repeats(period: int) -> int:
    return MIN_REPEATS if period <= SHORT_PERIOD else MIN_LONG_REPEATS


def _periods(ids: Sequence[int], longest: int) -> Iterator[int]:
    """How far before the end it was as it is at the end: the only periods it may have."""
    longest = min(longest, len(ids) // MIN_LONG_REPEATS)
    if not longest:
        return
    before = ids[-2 : -2 - longest : -1]
    at = -1
    for _ in range(before.count(ids[-1])):
        at = before.index(ids[-1], at + 1)
        period = at + 1
        if (
            period <= _NEAR
            or (
                ids[-_NEAR] == ids[-_NEAR - period]  # most differ here: no slices for them
                and ids[-_NEAR:] == ids[-_NEAR - period : -period]
            )
        ):
            yield period


def _ends_in_loop(ids: Sequence[int], period: int, span: int) -> bool:
    """Whether the last `span` ids repeat themselves with the period."""
    return len(ids) >= span and ids[period - span :] == ids[-span:-period]
