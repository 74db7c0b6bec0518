"""Finished conversations -> samples: the text road, for data that was made elsewhere.

Called by build.py for what `import` committed, and by drift.py. The texts of a whole batch are
encoded at once (rendering.py makes them), and each answer is cut out by ids: where its first
character begins an id, what stands before it is the prompt; where an id would straddle that place,
prompt and answer are encoded by themselves, as the engine would have met them. A conversation of
which that can't be said for every answer is quarantined, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_workers.contract.chat import Chat, load_tokenizer, tokenizer_sha256
from dflash_workers.contract.errors import BadInput, PromptRejected
from dflash_workers.contract.escaping import encode_marked
from dflash_workers.contract.flags import (
    EMPTY,
    GARBLED,
    MAX_CALLS,
    REPETITION,
    TOOL_CALL_LOOP,
    is_garbled,
    is_repetitive,
)
from dflash_workers.contract.records import Json, Row, RunSpec
from trainer.tokens.encoder import Encoded, Encoder
from trainer.tokens.fitness import skip_reason
from trainer.tokens.rendering import Rendered, Renderer, Span
from trainer.tokens.shards import Ids, Quarantined, Sample


@dataclass(frozen=True, slots=True)
class Cut:
    """One answer as ids, with the prompt before it and the stop id at its end."""

    turn: int
    message: Json
    ids: Ids
    prompt_len: int


@dataclass(slots=True)
class Made:
    """What became of a batch."""

    samples: list[Sample] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # answers that do not train, by reason
    quarantined: list[Quarantined] = field(default_factory=list)


class TextRoad:
    """Tokenises by one run's tokenizer, template and policies."""

    def __init__(self, chat: Chat, spec: RunSpec) -> None:
        self._chat = chat
        self._spec = spec
        self._renderer = Renderer(chat)
        backend: Any = chat.tokenizer
        self._encoder = Encoder(backend.backend_tokenizer)

    def samples_of(self, rows: Sequence[Row]) -> Made:
        """A sample per answer that trains."""
        made = Made()
        cuts = self.cut([(row.messages, row.tools) for row in rows])
        for row, found in zip(rows, cuts, strict=True):
            if isinstance(found, PromptRejected):
                left_out = Quarantined(id=row.id, reason=found.reason, detail=found.detail)
                made.quarantined.append(left_out)
                made.skipped[found.reason] += 1
                continue
            for answer in found:
                sampled = answer.ids[answer.prompt_len :].tolist()
                flags = _flags_of(answer.message, sampled)
                reason = skip_reason(sampled, flags, self._spec.sampling.stop_token_ids)
                if reason:
                    made.skipped[reason] += 1
                else:
                    made.samples.append(self._sample(row, answer, sampled, flags))
        return made

    def cut(
        self, conversations: Iterable[tuple[list[Json], list[Json]]]
    ) -> list[list[Cut] | PromptRejected]:
        """The answers of each conversation (messages, tools), or why it can't be told."""
        rendered = [self._rendered(*conversation) for conversation in conversations]
        texts = [text for found in rendered if isinstance(found, list) for text in found]
        plain = [text.text for text in texts if not text.is_marked]
        encodings = iter(self._encoder.encode(plain))
        cuts: list[list[Cut] | PromptRejected] = []
        for found in rendered:
            if isinstance(found, PromptRejected):
                cuts.append(found)
                continue
            mine = [None if text.is_marked else next(encodings) for text in found]
            try:
                cuts.append(
                    [
                        self._cut(span, text, encoded)
                        for text, encoded in zip(found, mine, strict=True)
                        for span in text.spans
                    ]
                )
            except PromptRejected as error:
                cuts.append(error)
        return cuts

    def text(self, ids: list[int]) -> str:
        """Ids as text, special tokens included."""
        return str(self._chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _rendered(self, messages: list[Json], tools: list[Json]) -> list[Rendered] | PromptRejected:
        try:
            return self._renderer.render(messages, tools)
        except PromptRejected as error:
            return error

    def _cut(self, span: Span, text: Rendered, encoded: Encoded | None) -> Cut:
        place = encoded.span(span.start, span.end) if encoded else None
        if encoded and place:
            ids, (prompt_len, end) = encoded.ids, place
        else:
            ids, prompt_len = self._encoded_apart(span, text)
            end = len(ids)
        stops = _places(ids[prompt_len:end], self._spec.sampling.stop_token_ids)
        if len(stops) == 0:
            raise PromptRejected("no_stop_id", f"turn {span.turn}: nothing ends the answer")
        if len(stops) > 1:
            raise PromptRejected("stop_id_inside", f"turn {span.turn}: the answer ends twice")
        ids = ids[: prompt_len + stops[0] + 1]
        if len(ids) > self._spec.target.context_len:
            raise PromptRejected("context_length", f"turn {span.turn}: {len(ids)} ids")
        return Cut(span.turn, span.message, ids, prompt_len)

    def _encoded_apart(self, span: Span, text: Rendered) -> tuple[Ids, int]:
        """Prompt and answer, each encoded by itself, and how many ids the prompt has."""
        prompt, answer = text.text[: span.start], text.text[span.start : span.end]
        tokenizer = self._chat.tokenizer
        if text.is_marked:
            before, after = encode_marked(tokenizer, prompt), encode_marked(tokenizer, answer)
        else:
            before, after = self._encoder.ids(prompt), self._encoder.ids(answer)
            if self.text(before + after) != prompt + answer:
                raise PromptRejected(
                    "boundary", f"turn {span.turn}: prompt and answer can't be told apart by ids"
                )
        return np.array(before + after, dtype=np.int32), len(before)

    def _sample(self, row: Row, answer: Cut, sampled: list[int], flags: list[str]) -> Sample:
        marker = self._spec.thinking_end_id
        return Sample(
            prompt_key=row.key,
            id=row.id,
            turn=answer.turn,
            ids=answer.ids,
            prompt_len=answer.prompt_len,
            thinking_end=answer.prompt_len + sampled.index(marker) if marker in sampled else -1,
            heldout=row.heldout,
            finish_reason="stop",
            flags=flags,
        )


def open_text_road(spec: RunSpec, model_dir: str) -> TextRoad:
    """Raises Missing without a tokenizer, BadInput for another than the run's."""
    tokenizer = load_tokenizer(model_dir)
    found = tokenizer_sha256(model_dir)
    if found != spec.target.tokenizer_sha256:
        raise BadInput(
            f"{model_dir}: its tokenizer is {found[:12]}..., run {spec.run!r} wants "
            f"{spec.target.tokenizer_sha256[:12]}...: pass the folder of {spec.target.name}"
        )
    chat = Chat(tokenizer, spec.chat_template, spec.template_kwargs, spec.control_tokens)
    return TextRoad(chat, spec)


def _places(ids: Ids, wanted: Sequence[int]) -> list[int]:
    """In order; for a few wanted ids the fastest way."""
    return sorted(at for token_id in wanted for at in np.flatnonzero(ids == token_id).tolist())


def _flags_of(message: Json, sampled: list[int]) -> list[str]:
    calls = message.get("tool_calls") or []
    text = message.get("reasoning_content", "") + message["content"]
    found = {
        EMPTY: not message["content"].strip() and not calls,
        REPETITION: is_repetitive(sampled[:-1]),
        TOOL_CALL_LOOP: len(calls) > MAX_CALLS,
        GARBLED: is_garbled(text),
    }
    return [flag for flag, holds in found.items() if holds]
