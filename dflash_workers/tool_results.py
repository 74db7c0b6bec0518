"""Recorded tool results, spliced in where the target calls the tool that gave them.

Called by rollout for each answer with calls. A result is used once, and only for a call of its
tool in the same turn: best for one with the arguments that it was recorded for, else for any, and
then it is told. Results that nobody called for are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_workers.contract.records import Json


@dataclass(frozen=True, slots=True)
class Spliced:
    """The results of one round of calls."""

    messages: list[Json]  # one per call, in their order
    left: list[Json]  # recorded results for later rounds
    args_differ: bool  # one was recorded for a call with other arguments


def splice_results(calls: Sequence[Json], recorded: Sequence[Json]) -> Spliced | None:
    """A tool message per call; None where a call has no recorded result."""
    left = list(recorded)
    messages: list[Json] = []
    args_differ = False
    for call in calls:
        function = call["function"]
        of_tool = [result for result in left if result["name"] == function["name"]]
        if not of_tool:
            return None
        result = next((r for r in of_tool if not _differs(r, function)), of_tool[0])
        left.remove(result)
        args_differ |= _differs(result, function)
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": function["name"],
                "content": result["content"],
            }
        )
    return Spliced(messages, left, args_differ)


def _differs(result: Json, function: Json) -> bool:
    """Whether the result is known to answer a call with other arguments."""
    return "arguments" in result and result["arguments"] != function["arguments"]
