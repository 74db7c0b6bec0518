"""One prompt's samples, token by token: which carry loss, which are thinking, answer or tool call.

Called by the `show` verb with what finding.py found; paints for a terminal with rich or as HTML.
Tokens are shown as the tokenizer decodes them: several share a piece where one character
needs them all. Whatever a text holds, it is shown as text: controls get pictures, HTML is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from dflash_workers.contract.answers import THINKING_MARKERS
from dflash_workers.contract.flags import UNFINISHED_THINKING
from dflash_workers.contract.records import Json
from dflash_workers.contract.tool_calls import CALL_START, PYTHON_TAG
from trainer.gate.document import document, escaped, visible
from trainer.tokens.shards import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, THINKING, ANSWER, TOOL = "prompt", "thinking", "answer", "tool"
STYLES = {PROMPT: "dim", THINKING: "magenta", ANSWER: "bold green", TOOL: "bold cyan"}
MAX_JOINED = 8  # ids of one character, at most; more that decode to nothing stand alone

_TOOL_END = "</tool_call>"
_REPLACEMENT = "\ufffd"  # what ids decode to that are part of a character
_PAGE_STYLE = """
.prompt { color: var(--dim); } .thinking { color: var(--think); } .answer { color: var(--good); }
.tool { color: var(--tool); } .loss { border-bottom: 2px solid currentColor; }
pre span:hover { outline: 1px solid currentColor; }
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring ids that decode to text together."""

    ids: list[int]
    text: str
    part: str  # prompt | thinking | answer | tool
    has_loss: bool


def pieces_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The whole sample."""
    ids = sample.ids.tolist()
    prompt = [
        Piece(part, text, PROMPT, has_loss=False)
        for part, text in _decoded(ids[: sample.prompt_len], tokenizer)
    ]
    thinking_end = sample.thinking_end + 1  # 0: none
    thinking = ids[sample.prompt_len : thinking_end]
    pieces = [
        Piece(part, text, THINKING, has_loss=True) for part, text in _decoded(thinking, tokenizer)
    ]
    rest = list(_decoded(ids[sample.prompt_len + len(thinking) :], tokenizer))
    is_thinking = UNFINISHED_THINKING in sample.flags or _opens_thinking(rest, thinking)
    return [*prompt, *pieces, *_answer_pieces(rest, is_thinking=is_thinking)]


def facts_of(sample: Sample) -> Json:
    """What is known of a sample beside its tokens."""
    return {
        "id": sample.id,
        "prompt_key": sample.prompt_key,
        "turn": sample.turn,
        "num_tokens": len(sample.ids),
        "num_loss_tokens": len(sample.ids) - sample.prompt_len,
        "thinking_end": sample.thinking_end,
        "finish_reason": sample.finish_reason,
        "heldout": sample.heldout,
        "flags": sample.flags,
    }


def painted(pieces: list[Piece]) -> Text:
    """For a terminal: colours by part, what carries loss is underlined."""
    text = Text()
    for piece in pieces:
        style = STYLES[piece.part] + (" underline" if piece.has_loss else "")
        text.append(visible(piece.text, keep_lines=True), style=style)
    return text


def page_of(shown: list[tuple[Sample, list[Piece]]]) -> str:
    """For a browser: the same, and the ids of each piece under the pointer."""
    title = f"Prompt {shown[0][0].id}"
    body = [f"<h1>{escaped(title)}</h1>", f"<p>{_legend()}</p>"]
    for sample, pieces in shown:
        facts = ", ".join(f"{name.replace('_', ' ')} {v}" for name, v in facts_of(sample).items())
        body += [f"<h2>Turn {sample.turn}</h2>", f"<p>{escaped(facts)}</p>"]
        body.append(f"<pre>{''.join(map(_span, pieces))}</pre>")
    return document(title, "\n".join(body), _PAGE_STYLE)


def _legend() -> str:
    parts = ", ".join(f'<span class="{part}">{part}</span>' for part in STYLES)
    return f'{parts}; <span class="loss">underlined</span>: carries loss'


def _span(piece: Piece) -> str:
    names = f"{piece.part} loss" if piece.has_loss else piece.part
    ids = " ".join(map(str, piece.ids))
    shown = escaped(piece.text, keep_lines=True)
    return f'<span class="{names}" title="{ids}">{shown}</span>'


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], str]]:
    """Ids with their text; those of one character together."""
    begin = 0
    while begin < len(ids):
        end = begin + 1
        text = _text(ids[begin:end], tokenizer)
        while _REPLACEMENT in text and end < min(len(ids), begin + MAX_JOINED):
            end += 1
            text = _text(ids[begin:end], tokenizer)
        if _REPLACEMENT in text:
            end = begin + 1
            text = _text(ids[begin:end], tokenizer)
        yield ids[begin:end], text
        begin = end


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _opens_thinking(rest: list[tuple[list[int], str]], thinking: list[int]) -> bool:
    """Whether an answer whose thinking has no end id begins with thinking all the same."""
    begin = "".join(text for _ids, text in rest[:8]).lstrip()
    return not thinking and any(begin.startswith(start) for start, _end in THINKING_MARKERS)


def _answer_pieces(rest: list[tuple[list[int], str]], *, is_thinking: bool) -> Iterator[Piece]:
    ends = [end for _start, end in THINKING_MARKERS]
    part = THINKING if is_thinking else ANSWER
    recent = ""
    for ids, text in rest:
        recent = (recent + text)[-32:]
        if part == ANSWER and recent.endswith((CALL_START, PYTHON_TAG)):
            part = TOOL
        yield Piece(ids, text, part, has_loss=True)
        is_over = recent.rstrip().endswith
        if (part == TOOL and is_over(_TOOL_END)) or (part == THINKING and is_over(tuple(ends))):
            part = ANSWER
