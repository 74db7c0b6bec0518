"""What simulated engines answer: a pure function of the question, known to whoever checks.

Used by engine.py and by oracles. A question is the ids up to and including the last "assistant"
header, or all of them where there is none; what follows the header is an answer begun elsewhere,
which goes on where it stopped. So an answer that was pieced together is right exactly if it is the
one that was sampled in one go. Answers are slices of one fixed text of random letters, one id each
and all ids of one width: any part of any answer is cut out of bytes that stand ready, as JSON too.
"""

from __future__ import annotations

import random
import string
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.simulated.lengths import LONGEST, Lengths

HEADER = "<|im_start|>assistant\n"
STOP = "<|im_end|>"
NUM_LETTERS = 1 << 18  # of the text

_ID_BYTES = 4
_WHOLE = float(1 << 32)


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, and how much of the answer came with it."""

    name: str  # 16 hex digits
    offset: int  # of the answer in the text
    num_ids: int  # of the whole answer, the stop id included
    num_given: int  # of it


class Answers:
    """All answers of one model folder, of given lengths."""

    def __init__(self, model_dir: Path, lengths: Lengths) -> None:
        """Raises KeyError for a tokenizer that isn't one of ChatML, or has no plain letters;
        ValueError where their ids differ in width.
        """
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._lengths = lengths
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.stop_id = vocabulary[STOP]
        header = tokenizer.encode(HEADER, add_special_tokens=False).ids
        self._header = _packed(header)
        letters = random.Random(0).choices(string.ascii_lowercase, k=NUM_LETTERS)
        self._ids = [vocabulary[letter] for letter in letters]
        self._letter_ids = frozenset(self._ids)
        (width,) = {len(str(letter_id)) for letter_id in self._letter_ids}
        self._width = width + 1
        self._json = ",".join(map(str, self._ids)).encode() + b","
        self._text = "".join(letters).encode()

    def question_of(self, input_ids: list[int]) -> Question:
        """Of a prompt, with or without a part of its answer."""
        asked = _packed(input_ids)
        end = self._end_of_header(asked)
        digest = blake2b(asked[:end], digest_size=20).digest()
        share, tail, offset = (int.from_bytes(digest[at : at + 4]) for at in (8, 12, 16))
        return Question(
            name=digest[:8].hex(),
            offset=offset % (NUM_LETTERS - LONGEST),
            num_ids=self._lengths.at((share + 0.5) / _WHOLE, tail / _WHOLE),
            num_given=len(input_ids) - end // _ID_BYTES,
        )

    def answer_of(self, input_ids: list[int]) -> list[int]:
        """The whole answer, the stop id last, whatever of it stands in the ids already."""
        question = self.question_of(input_ids)
        end = question.offset + question.num_ids - 1
        return [*self._ids[question.offset : end], self.stop_id]

    def first_stop(self, question: Question, stop_ids: set[int], end: int) -> int:
        """The place after the first of these ids, between the given part and `end`; 0: none."""
        letters = stop_ids & self._letter_ids
        if not letters:
            return 0
        part = self._ids[question.offset + question.num_given : question.offset + end]
        found = (at for at, letter_id in enumerate(part) if letter_id in letters)
        return next((question.num_given + at + 1 for at in found), 0)

    def id_at(self, question: Question, place: int) -> int:
        """A letter's."""
        return self._ids[question.offset + place]

    def json(self, question: Question, num_made: int, stop_id: int | None) -> tuple[bytes, bytes]:
        """Text and ids, without quotes and brackets, of what follows the given part.

        `stop_id`: the last of them, which is no text.
        """
        start = question.offset + question.num_given
        end = start + num_made - (stop_id is not None)
        ids = self._json[start * self._width : end * self._width]
        ids = ids[:-1] if stop_id is None else ids + str(stop_id).encode()
        return self._text[start:end], ids

    def _end_of_header(self, asked: bytes) -> int:
        """In bytes; a find may be one across the borders of two ids."""
        at = len(asked)
        while (at := asked.rfind(self._header, 0, at)) >= 0:
            if at % _ID_BYTES == 0:
                return at + len(self._header)
            at += len(self._header) - 1
        return len(asked)


def _packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)
