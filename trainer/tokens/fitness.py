"""Which answers train: one table of flags, for both roads.

Asked by ids_road.py and text_road.py for each answer; the names are the contract's (flags.py), so
that workers, shards and gate mean the same. What a flag says of a conversation (a tool without a
result, a full context) is no fault of the answers that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dflash_workers.contract.flags import (
    CONTEXT_FULL,
    EMPTY,
    GARBLED,
    REPETITION,
    STRAY_MARKER,
    TOOL_ARGS_DIFFER,
    TOOL_CALL_LOOP,
    TOOL_RESULT_MISSING,
    TOOL_ROUNDS,
    TRUNCATED,
    UNFINISHED_THINKING,
)

# Whether an answer with the flag trains. A truncated one is the target's own text as far as it
# goes; a loop, or bytes that are no text, would be learned by heart.
TRAINS = {
    TRUNCATED: True,
    UNFINISHED_THINKING: True,
    STRAY_MARKER: True,
    TOOL_RESULT_MISSING: True,
    TOOL_ARGS_DIFFER: True,
    TOOL_ROUNDS: True,
    CONTEXT_FULL: True,
    EMPTY: False,
    REPETITION: False,
    TOOL_CALL_LOOP: False,
    GARBLED: False,
}


def skip_reason(
    sampled: Sequence[int] | npt.NDArray[np.int32],
    flags: Iterable[str],
    stop_token_ids: Sequence[int],
) -> str | None:
    """Why an answer does not train; None where it does. `sampled`: its ids, stop id included.

    Flags that the table doesn't list are notes on how the answer was made.
    """
    if len(sampled) == 0 or sampled[0] in stop_token_ids:
        return EMPTY
    unfit = [flag for flag in flags if not TRAINS.get(flag, True)]
    if UNFINISHED_THINKING in flags:  # no content yet, but the target's own thinking
        unfit = [flag for flag in unfit if flag != EMPTY]
    return unfit[0] if unfit else None
