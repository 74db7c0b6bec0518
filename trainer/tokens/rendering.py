"""A finished conversation -> texts, and where in them the answers stand.

Called by text_road.py. Each answer's own prompt is rendered as a worker would have rendered it, and
the conversation up to the answer's end; the answer is what the latter has more. Where a later
rendering only goes on from an earlier one, one text serves both; where the template changes what
was said before (most drop earlier thinking), each answer has a text of its own. Invariant:
`text[:start]` is the prompt that the target would have been given, or what the template itself
says is not its words ({% generation %}).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_workers.contract.chat import KEEP, Chat
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.escaping import escaping
from dflash_workers.contract.records import Json


@dataclass(frozen=True, slots=True)
class Span:
    """An answer's place in a text, in characters."""

    turn: int  # counts the conversation's answers
    message: Json  # as it was recorded
    start: int
    end: int  # what follows the stop token included


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text that holds one or more of a conversation's answers."""

    text: str
    spans: list[Span]
    is_marked: bool  # holds control tokens that are to be encoded as words; see escaping.py


class Renderer:
    """Renders by one run's template and policy for control tokens."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._marks_generation = "generation" in _block_names(chat.template)
        self._escaping = escaping(chat.control_tokens if chat.control_policy != KEEP else ())

    def render(self, messages: list[Json], tools: list[Json]) -> list[Rendered]:
        """Every recorded answer, in one text or in several. Raises PromptRejected."""
        recorded = messages
        is_marked = self._escaping.is_due([messages, tools])
        if is_marked:
            messages, tools = self._escaping.marked([messages, tools])
        texts: list[Rendered] = []
        for turn, at in enumerate(_answers_in(messages)):
            text = self._chat.render(messages[: at + 1], tools, add_generation_prompt=False)
            start = self._start(messages[: at + 1], tools, text)
            span = Span(turn, recorded[at], start, len(text))
            before = texts[-1] if texts else None
            if before and start >= len(before.text) and text.startswith(before.text):
                texts[-1] = Rendered(text, [*before.spans, span], is_marked)
            else:
                texts.append(Rendered(text, [span], is_marked))
        if not texts:
            raise PromptRejected("no_answer", "no message of an assistant's")
        return texts

    def _start(self, messages: list[Json], tools: list[Json], text: str) -> int:
        """Where the last message's answer begins in the whole text."""
        prompt = self._chat.render(messages[:-1], tools) if len(messages) > 1 else ""
        if prompt and text.startswith(prompt):
            return len(prompt)
        if self._marks_generation:
            return self._generation_start(messages, tools)
        raise PromptRejected(
            "prompt_not_prefix", "the template renders the conversation otherwise than its prompt"
        )

    def _generation_start(self, messages: list[Json], tools: list[Json]) -> int:
        # Where a tokenizer is loaded, so is this; elsewhere it would cost a second.
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = self._chat
        _, (spans,) = render_jinja_template(
            [messages],
            tools=tools or None,
            chat_template=chat.template,
            return_assistant_tokens_mask=True,
            **{**chat.tokenizer.special_tokens_map, **chat.template_kwargs},
        )
        if not spans or not spans[-1][0]:
            raise PromptRejected("no_generation", "the template marks no words as the target's")
        return int(spans[-1][0])


def _answers_in(messages: list[Json]) -> list[int]:
    """Places of the recorded answers; one without content was not recorded."""
    return [
        at
        for at, message in enumerate(messages)
        if message["role"] == "assistant" and "content" in message
    ]


def _block_names(template: str) -> set[str]:
    """First words of the template's statements: `if`, `for`, `generation`..."""
    statements = (part.partition("%}")[0] for part in template.split("{%")[1:])
    return {statement.strip("-+ \n").split(" ")[0] for statement in statements}
