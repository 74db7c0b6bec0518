"""Messages -> the ids that the engine is prompted with; an answer's text -> messages again.

The only module of the contract that imports transformers. The template's text comes from run.json
and never from the model folder, so that producer, workers and trainer render the same ids. Ids and
not text are what counts: a rendered prompt is sent as it is, and no answer is tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import orjson

from dflash_workers.contract.errors import BadInput, Missing, PromptRejected
from dflash_workers.contract.records import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# What a template's own code may raise while it renders.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_THINK_START, _THINK_END = "<think>", "</think>"
_CALL_START = re.compile(r"<tool_call>\s*(?=\{)")
_CALL_END = re.compile(r"\s*</tool_call>")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's text, split by the template's own markers."""

    content: str
    reasoning_content: str
    tool_calls: list[Json]

    def as_message(self) -> Json:
        """The assistant message that a chat server would keep in its history."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True, slots=True)
class Chat:
    """A tokenizer and the run's template."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    template_kwargs: Json

    def prompt_ids(self, messages: list[Json], tools: list[Json]) -> list[int]:
        """Ids up to and including the header of the answer to come.

        Raises PromptRejected where the template refuses the conversation.
        """
        try:
            text = self.render(messages, tools)
        except TEMPLATE_ERRORS as error:
            raise PromptRejected("template_error", str(error)) from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: list[Json], tools: list[Json]) -> str:
        """The prompt as text."""
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        )

    def text(self, ids: list[int]) -> str:
        """Ids as text, without special tokens such as the stop id."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def thinking_end_id(self) -> int:
        """The id that ends thinking, for run.json; -1 where the tokenizer has no such id."""
        ids = self.tokenizer.encode(_THINK_END, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 else -1

    def parse(self, ids: list[int], thinking: bool = False) -> ParsedAnswer:
        """Split an answer into reasoning, content and tool calls."""
        return parse_answer(self.text(ids), thinking)


def parse_answer(text: str, thinking: bool = False) -> ParsedAnswer:
    """Split an answer's text. Thinking without an end marker is all reasoning.

    `thinking`: the prompt has opened the thinking already. Without it only an answer that begins
    with the start marker thinks. A malformed tool call stays content.
    """
    opened = text.lstrip().startswith(_THINK_START)
    reasoning = ""
    if thinking or opened:
        reasoning, _, text = text.partition(_THINK_END)
        reasoning = reasoning.strip().removeprefix(_THINK_START).strip()
    content, calls = _split_tool_calls(text)
    return ParsedAnswer(content.strip(), reasoning, calls)


def _split_tool_calls(text: str) -> tuple[str, list[Json]]:
    """The text around the well-formed tool calls, and these."""
    kept: list[str] = []
    calls: list[Json] = []
    at = 0
    while start := _CALL_START.search(text, at):
        call, end = _tool_call(text, start.end())
        kept.append(text[at : start.start() if call else end])
        calls += [call] if call else []
        at = end
    return "".join([*kept, text[at:]]), calls


def _tool_call(text: str, at: int) -> tuple[Json | None, int]:
    """The call whose JSON begins at `at` and where it ends; None where it is malformed."""
    try:
        # The JSON's own end counts: an argument may well contain the end marker.
        _, end = json.JSONDecoder().raw_decode(text, at)
        call = orjson.loads(text[at:end])
    except (ValueError, RecursionError):
        return None, at
    closing = _CALL_END.match(text, end)
    arguments = call.get("arguments", {})
    if not closing or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None, at
    function = {"name": call["name"], "arguments": arguments}
    return {"type": "function", "function": function}, closing.end()


def open_chat(model_dir: str, template: str, template_kwargs: Json) -> Chat:
    """The tokenizer of a local model folder with a template's text."""
    return Chat(load_tokenizer(model_dir), template, template_kwargs)


def load_tokenizer(model_dir: str) -> PreTrainedTokenizerBase:
    """Never asks a hub. Raises Missing where the folder has no tokenizer."""
    if not (Path(model_dir) / "tokenizer.json").is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no tokenizer.json: pass --model FOLDER")
    from transformers import AutoTokenizer  # loads torch: seconds that `--help` need not take

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (
        Exception
    ) as error:  # tokenizers' Rust side raises nothing narrower for a file it dislikes
        raise BadInput(f"{model_dir}: tokenizer can't be loaded: {error!r}") from error
    return tokenizer


def own_template(model_dir: str) -> str:
    """The template that the model brings. Raises BadInput where it has none."""
    template = load_tokenizer(model_dir).chat_template
    if not isinstance(template, str):
        raise BadInput(f"{model_dir}: no chat template: pass --chat-template FILE")
    return template


def tokenizer_sha256(model_dir: str) -> str:
    """Hash of what decides ids: the tokenizer's files, by content."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = Path(model_dir) / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
