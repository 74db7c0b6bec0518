"""Control tokens inside a text: marked before a template renders it, encoded as plain text after.

Used by chat.py. A user's "<|im_end|>" would become the control id by which the target tells who
speaks. Escaped, it becomes the ids of its letters, while those that the template writes stay what
they are. Keys count as text: a tool's parameter may have such a name. The marks are two
private-use characters, which an escaped text itself loses, so that nobody can forge them. Follows
transformers' `sanitize_control_tokens`, which leaves keys alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_workers.contract.errors import PromptRejected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Escaping:
    """Finds and marks the given tokens."""

    pattern: re.Pattern[str]

    def is_due(self, value: Any) -> bool:
        """Whether a string within JSON values holds a token: 1/200 of the time to encode them."""
        if isinstance(value, str):
            return self.pattern.search(value) is not None
        if isinstance(value, dict):
            return any(self.is_due(k) or self.is_due(v) for k, v in value.items())
        return isinstance(value, list) and any(self.is_due(item) for item in value)

    def marked(self, value: Any) -> Any:
        """The same with every token marked."""
        # Where a tokenizer is loaded, so is this; elsewhere it would cost a second.
        from transformers.utils.chat_template_utils import mark_control_tokens

        if isinstance(value, dict):
            return {self.marked(k): self.marked(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        return mark_control_tokens(value, self.pattern)


def escaping(tokens: Iterable[str]) -> Escaping:
    """Of these tokens; the longest first, as one may hold another."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return Escaping(re.compile("|".join(map(re.escape, longest_first)) or "(?!)"))


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered text, marked tokens as plain text. Raises PromptRejected."""
    from transformers.utils.chat_template_utils import encode_marked_chat

    try:
        return list(encode_marked_chat(tokenizer, text))
    except ValueError as error:  # a token that the tokenizer also makes of letters
        raise PromptRejected("control_token", str(error)) from error


def control_tokens(tokenizer: PreTrainedTokenizerBase, framing: str) -> tuple[str, ...]:
    """The special tokens, and any other that a plain conversation's `framing` holds.

    Role headers of some models are not special (DeepSeek R1's). Markers such as "<tool_call>" are
    words: a prompt about tools says them, and the target is to read them as it was trained to.
    """
    added = tokenizer.added_tokens_decoder.values()
    frame = {t.content for t in added if t.content in framing and not t.content.isspace()}
    return tuple(sorted(frame.union(t.content for t in added if t.special)))
