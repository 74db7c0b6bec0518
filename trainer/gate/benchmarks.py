"""Prompts of public benchmarks: does a sample's prompt hold one of them?

Reads files that the `gate` verb names, asked by tally.py for each sample. Two texts overlap where
they share 13 words in a row, lower-cased and without punctuation; a benchmark prompt of 8 to 12
words counts where all of it occurs, a shorter one can't be told from chance and is left out. After
Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json

LONG, SHORT = 13, 8  # words
FIELDS = ("prompt", "question", "problem", "instruction", "input", "text", "turns")
_MESSAGES = ("messages", "conversations")
_SPEAKERS = ("user", "human")
_WORD = re.compile(r"\w+")


class Benchmarks:
    """An index of benchmark prompts by their runs of words."""

    def __init__(self, named_prompts: Iterable[tuple[str, str]]) -> None:
        """(name of the benchmark, prompt) pairs."""
        self.num_prompts = 0
        self.num_too_short = 0
        self._names: dict[str, str] = {}
        self._lengths: set[int] = set()
        for name, prompt in named_prompts:
            self._add(name, words_of(prompt))

    def find(self, text: str) -> str:
        """The name of a benchmark that the text overlaps with; "" where there is none."""
        words = words_of(text)
        for length in self._lengths:
            for run in _runs(words, length):
                if run in self._names:
                    return self._names[run]
        return ""

    def _add(self, name: str, words: Sequence[str]) -> None:
        self.num_prompts += 1
        if len(words) < SHORT:
            self.num_too_short += 1
            return
        length = min(len(words), LONG)
        self._lengths.add(length)
        for run in _runs(words, length):
            self._names.setdefault(run, name)


def read_benchmarks(paths: Sequence[Path]) -> Benchmarks:
    """From files: JSON Lines with prompts under usual names, or text with a prompt per line.

    Raises BadInput where a file can't be read or a JSON line has no prompt.
    """
    return Benchmarks((path.name, prompt) for path in paths for prompt in _prompts(path))


def words_of(text: str) -> list[str]:
    """Lower-cased, without punctuation."""
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


def _prompts(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--benchmark {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix not in (".jsonl", ".json", ".ndjson"):
            yield line
            continue
        try:
            found = _texts(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise BadInput(f"--benchmark {path}:{number}: not a JSON line: {error}") from error
        if not found:
            raise BadInput(f"--benchmark {path}:{number}: no prompt: it needs {', '.join(FIELDS)}")
        yield from found


def _texts(row: object) -> list[str]:
    """What the row asks, as one text per turn."""
    if isinstance(row, str):
        return [row]
    if not isinstance(row, dict):
        return []
    messages = [m for name in _MESSAGES for m in row.get(name) or [] if isinstance(m, dict)]
    said = [_said(m) for m in messages if m.get("role", m.get("from")) in _SPEAKERS]
    for name in FIELDS:
        value = row.get(name)
        said += value if isinstance(value, list) else [value]
    return [text for text in said if isinstance(text, str) and text.strip()]


def _said(message: Json) -> object:
    return message.get("content", message.get("value"))
