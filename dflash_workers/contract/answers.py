"""An answer's text -> what it is made of: reasoning, content, tool calls.

Used by the workers, for what the target said (answering.py) and what is wrong with it (quality.py);
tool_calls.py reads the calls. Reasoning is what stands between the template's own markers. What is
no well-formed part stays content, as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_workers.contract.records import Json
from dflash_workers.contract.tool_calls import split_tool_calls

THINK_START, THINK_END = THINK = ("<think>", "</think>")
# How targets mark their thinking; a template's own are the first that it mentions.
THINKING_MARKERS = (
    THINK,
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's text, split by the template's own markers."""

    content: str
    reasoning_content: str
    tool_calls: list[Json]
    is_thinking: bool = False  # its thinking began and never ended

    def as_message(self) -> Json:
        """The assistant message that a chat server would keep in its history."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


def thinking_markers(template: str) -> tuple[str, str]:
    """How thinking begins and ends, by a chat template's text; THINK where it doesn't say."""
    return next((pair for pair in THINKING_MARKERS if pair[1] in template), THINK)


def parse_answer(
    text: str,
    thinking: bool = False,
    *,
    tools: Sequence[Json] = (),
    markers: tuple[str, str] = THINK,
) -> ParsedAnswer:
    """Split an answer's text. Thinking without an end marker is all reasoning.

    `thinking`: the prompt has opened the thinking already. Without it only an answer that begins
    with the start marker thinks. `tools`: those that were offered, for the calls that only their
    names and schemas tell from text. A malformed tool call stays content.
    """
    start, end = markers
    reasoning, ending = "", end
    if thinking or text.lstrip().startswith(start):
        reasoning, ending, text = text.partition(end)
        reasoning = reasoning.strip().removeprefix(start).strip()
    content, calls = split_tool_calls(text, tools)
    return ParsedAnswer(content.strip(), reasoning, calls, is_thinking=not ending)
