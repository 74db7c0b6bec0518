"""Messages -> the ids that the engine is prompted with.

Used by producer (run creation, context check) and workers (rollout.py); loads the tokenizer, which
no other module of the contract does. The template's text comes from run.json and never from the
model folder, so that producer, workers and trainer render the same ids. Ids and not text are what
counts: a rendered prompt is sent as it is, and no answer is tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from dflash_workers.contract.answers import THINK_END
from dflash_workers.contract.errors import BadInput, Missing, PromptRejected
from dflash_workers.contract.escaping import Escaping, control_tokens, encode_marked, escaping
from dflash_workers.contract.records import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# What becomes of the target's control tokens inside a text. `reject` is the planner's part; what it
# can't know, the target's own words in a later turn, is escaped.
ESCAPE, REJECT, KEEP = CONTROL_POLICIES = ("escape", "reject", "keep")

# What a template's own code may raise while it renders.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_PIECE_CHARS = 1 << 16
_IDS_PER_CUT = 16  # more than a cut between two pieces can add

_PLAIN = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


@dataclass(frozen=True)
class Chat:
    """A tokenizer, and the run's template and policy for control tokens."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    template_kwargs: Json
    control_policy: str  # one of CONTROL_POLICIES

    def prompt_ids(self, messages: list[Json], tools: list[Json]) -> list[int]:
        """Ids up to and including the header of the answer to come.

        Raises PromptRejected where the template refuses the conversation.
        """
        text, is_marked = self._rendered(messages, tools)
        return self._encode(text, is_marked)

    def count_ids(self, messages: list[Json], tools: list[Json], enough: int) -> int:
        """How many `prompt_ids` are, made piece by piece and no further than needed to tell.

        Up to `enough`: so many or a few less. Over it: so many or more. Raises PromptRejected where
        the template refuses the conversation.
        """
        text, is_marked = self._rendered(messages, tools)
        num_ids = 0
        for num_cuts, at in enumerate(range(0, len(text), _PIECE_CHARS)):
            num_ids += len(self._encode(text[at : at + _PIECE_CHARS], is_marked))
            at_least = num_ids - num_cuts * _IDS_PER_CUT
            if at_least > enough:
                return at_least
        return num_ids if num_ids <= enough else len(self._encode(text, is_marked))

    def render(
        self, messages: list[Json], tools: list[Json], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt as text. Raises PromptRejected where the template refuses it."""
        with _translated():
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    chat_template=self.template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
            )

    def text(self, ids: list[int]) -> str:
        """Ids as text, without special tokens such as the stop id."""
        return self.decode(ids, skip_special_tokens=True)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Ids as text."""
        return str(self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text's ids; what looks like a special token becomes one."""
        # Without the place of each id in the text, which takes a quarter of the time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def thinking_end_id(self) -> int:
        """The id that ends thinking, for run.json; -1 where the tokenizer has no such id."""
        ids = self.tokenizer.encode(THINK_END, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 else -1

    def _rendered(self, messages: list[Json], tools: list[Json]) -> tuple[str, bool]:
        """The prompt as text, and whether it holds marked control tokens."""
        is_marked = False
        with _translated():  # a conversation may be too deeply nested to be looked at
            if self.control_policy != KEEP and self._escaping.is_due([messages, tools]):
                messages, tools = self._escaping.marked([messages, tools])
                is_marked = True
        return self.render(messages, tools), is_marked

    def _encode(self, text: str, is_marked: bool) -> list[int]:
        if is_marked:
            return encode_marked(self.tokenizer, text)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _backend(self) -> Tokenizer:
        """What transformers' tokenizer wraps: each call of it takes as long again as the work. It
        would set these two aside at every call."""
        backend: Tokenizer = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _decoder(self) -> Tokenizer | PreTrainedTokenizerBase:
        """The wrapper where it changes what is decoded: spaces, of old models that are no BPE."""
        is_bpe = type(self._backend.model).__name__ == "BPE"
        cleans_up = self.tokenizer.clean_up_tokenization_spaces and not is_bpe
        return self.tokenizer if cleans_up else self._backend

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """The tokens by which the target tells who speaks; see escaping.py."""
        try:
            framing = self.render(_PLAIN, [], add_generation_prompt=False)
        except PromptRejected:
            framing = ""
        return control_tokens(self.tokenizer, framing)

    @cached_property
    def _escaping(self) -> Escaping:
        return escaping(self.control_tokens)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        raise PromptRejected("template_error", str(error)) from error


def open_chat(
    model_dir: str, template: str, template_kwargs: Json, control_policy: str = ESCAPE
) -> Chat:
    """The tokenizer of a local model folder with a template's text."""
    return Chat(load_tokenizer(model_dir), template, template_kwargs, control_policy)


def load_tokenizer(model_dir: str) -> PreTrainedTokenizerBase:
    """Never asks a hub. Raises Missing where the folder has no tokenizer."""
    if not (Path(model_dir) / "tokenizer.json").is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no tokenizer.json: pass --model FOLDER")
    # A second that `--help` need not take. AutoTokenizer would load torch and take four, for the
    # same ids: what tokenizer.json says holds, whatever class the folder names.
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # tokenizers' Rust side raises nothing narrower for a bad file
        raise BadInput(f"{model_dir}: tokenizer can't be loaded: {error!r}") from error
    return tokenizer


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template that the model brings. Raises BadInput where it has none."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise BadInput(f"{tokenizer.name_or_path}: no chat template: pass --chat-template FILE")
    return template


def tokenizer_sha256(model_dir: str) -> str:
    """Hash of what decides ids: the tokenizer's files, by content."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = Path(model_dir) / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
