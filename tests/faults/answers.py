"""What the engine of the fault tests answers: a pure function of the question, known to the oracle.

A question is everything up to and including the last "assistant" header; what follows it in the
ids is an answer begun elsewhere, which goes on where it stopped. So an answer that was pieced
together is right exactly if it is the one that was sampled in one go. Words in the last user
message choose how long it is, and how the engine behaves (engine_process.py).
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

DEFAULT_TOKENS = 8
HEADER = "<|im_start|>assistant\n"
STOP = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, and how much of the answer came with it."""

    name: str  # 16 hex digits, of the ids
    message: str  # the last user message
    answer_ids: list[int]  # the whole answer, stop id included
    num_given: int  # ids of it that the request brought along


class Answers:
    """All answers of one model folder."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._header = self._ids(HEADER)
        (self._stop_id,) = self._ids(STOP)
        letters = (self._ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz ,.")
        self._letter_ids = [ids[0] for ids in letters if len(ids) == 1]

    def read(self, input_ids: list[int]) -> Question:
        """Raises ValueError for ids without an assistant header."""
        end = self._end_of_header(input_ids)
        text = self._tokenizer.decode(input_ids[:end], skip_special_tokens=False)
        message = text.rpartition("<|im_start|>user\n")[2].partition(STOP)[0]
        name = hashlib.blake2b(repr(input_ids[:end]).encode(), digest_size=8).hexdigest()
        return Question(name, message, self._answer(name, message), len(input_ids) - end)

    def text(self, ids: list[int]) -> str:
        """As a server gives it."""
        return str(self._tokenizer.decode(ids))

    def _answer(self, name: str, message: str) -> list[int]:
        num_tokens = int(number_in(message, "tokens", DEFAULT_TOKENS))
        letters = random.Random(name).choices(self._letter_ids, k=num_tokens)
        if "loop" in message:
            letters = (letters[:3] * num_tokens)[:num_tokens]
        return [*letters, self._stop_id]

    def _end_of_header(self, input_ids: list[int]) -> int:
        width = len(self._header)
        for start in range(len(input_ids) - width, -1, -1):
            if input_ids[start : start + width] == self._header:
                return start + width
        raise ValueError("no assistant header among the ids")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def number_in(message: str, name: str, otherwise: float) -> float:
    """The value of `name=...` in a message."""
    found = re.search(rf"\b{name}=([\d.]+)", message)
    return float(found[1]) if found else otherwise
