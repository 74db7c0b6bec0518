"""An answer's ids -> its text and its parts.

Called by answering for each answer, new or noted. Special tokens are no text, but for those that
mark thinking or a tool call; where they stand inside content, quality.py wants to know it. One
decoding is enough for nearly every answer, which holds none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_workers.contract.answers import parse_answer, thinking_markers
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.escaping import escaping
from dflash_workers.contract.records import Json
from dflash_workers.contract.tool_calls import CALL_START, PYTHON_TAG
from dflash_workers.quality import Reading

_THINK_TAIL = 16  # ids at a prompt's end that may spell the start of thinking
_NO_ID = -1


@dataclass(frozen=True)
class Reader:
    """Reads the answers of one run's target."""

    chat: Chat

    def read(
        self,
        input_ids: list[int],
        output_ids: list[int],
        tools: Sequence[Json],
        shown: str | None = None,
    ) -> Reading:
        """The answer to `input_ids`. `output_ids`: without the stop id. `shown`: their text with
        special tokens, where it was decoded already.
        """
        start, _ = self._thinking
        thinking = self._opens_thinking and (
            self._decode(input_ids[-_THINK_TAIL:]).rstrip().endswith(start)
        )
        if shown is None:
            shown = self._decode(output_ids)
        text = self._text(output_ids) if self._special.search(shown) else shown
        parsed = parse_answer(text, thinking, tools=tools, markers=self._thinking)
        if text is shown:
            return Reading(parsed, text, parsed.content)
        content = parse_answer(shown, thinking, tools=tools, markers=self._thinking).content
        return Reading(parsed, text, content)

    @functools.cached_property
    def call_id(self) -> int:
        """The id that begins a tool call; -1 where the target has none."""
        return self._id_of(CALL_START)

    def _text(self, ids: list[int]) -> str:
        """The ids' text without special tokens, but with the markers among these."""
        parts: list[str] = []
        begin = 0
        for at, token_id in enumerate(ids):
            if token_id in self._markers:
                parts += [self.chat.text(ids[begin:at]), self._markers[token_id]]
                begin = at + 1
        return "".join([*parts, self.chat.text(ids[begin:])])

    def _decode(self, ids: list[int]) -> str:
        return self.chat.decode(ids, skip_special_tokens=False)

    def _id_of(self, token: str) -> int:
        return int(self.chat.tokenizer.get_added_vocab().get(token, _NO_ID))

    @functools.cached_property
    def _thinking(self) -> tuple[str, str]:
        return thinking_markers(self.chat.template)

    @functools.cached_property
    def _opens_thinking(self) -> bool:
        """Whether a prompt may end in the start of thinking: the template would write it."""
        return self._thinking[0] in self.chat.template

    @functools.cached_property
    def _markers(self) -> dict[int, str]:
        tokens = (PYTHON_TAG, *self._thinking)
        return {self._id_of(token): token for token in tokens if self._id_of(token) != _NO_ID}

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        return escaping(self.chat.control_tokens).pattern
