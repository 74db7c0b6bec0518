"""Shards and what people can read of them: the samples, each with the text of its row.

Reads shards <- tokens/, and the data that their commit names <- dflash_workers; hands both to
-> tally.py and tokens/show.py, a shard at a time. Ids come from the shard alone; text, source and
tools come from the row, and are absent where the row is: no tokenizer is needed to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dflash_workers.contract.commit import read_rows
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import Commit, Json, Row
from dflash_workers.contract.store import Store
from trainer.tokens.shards import (
    Provenance,
    Sample,
    read_parts,
    read_provenance,
    read_quarantined,
    read_shard,
)


@dataclass(frozen=True, slots=True)
class Words:
    """What a row says of one of its answers."""

    source: str  # file or place that the prompt came from, without the line
    asked: str  # all that the user said
    content: str
    reasoning: str
    num_tools: int  # offered
    num_calls: int  # made in this answer


@dataclass(frozen=True, slots=True, eq=False)
class ReadShard:
    """The samples of one commit with their words, as far as these are there."""

    provenance: Provenance
    samples: list[Sample]
    words: Mapping[tuple[str, int], Words]  # by prompt key and turn
    num_quarantined: int  # conversations that it leaves out

    def pairs(self) -> Iterator[tuple[Sample, Words | None]]:
        """Each sample with its words."""
        for sample in self.samples:
            yield sample, self.words.get((sample.prompt_key, sample.turn))


def read_with_words(store: Store, key: str) -> Iterator[ReadShard]:
    """A shard and its rows; of a compacted one each part, one after another.

    Raises Corrupt, Missing for the shard, before anything is given; rows may be gone.
    """
    body = store.get(key)
    samples = read_shard(body)
    num_quarantined = len(read_quarantined(body))
    at = 0
    for part in read_parts(body) or [read_provenance(body)]:
        mine, at = samples[at : at + part["num_samples"]], at + part["num_samples"]
        yield ReadShard(part, mine, _words_of_commit(store, part["commit_key"]), num_quarantined)
        num_quarantined = 0


def _words_of_commit(store: Store, commit_key: str) -> dict[tuple[str, int], Words]:
    try:
        rows = read_rows(store, load(Commit, store.get(commit_key)))
    except (Corrupt, Missing):
        return {}
    return {key: words for row in rows for key, words in words_of(row)}


def words_of(row: Row) -> Iterator[tuple[tuple[str, int], Words]]:
    """The words of each of a row's answers, by prompt key and turn."""
    asked = "\n".join(_text(m, "content") for m in row.messages if m.get("role") == "user")
    source = _place(row.source)
    for turn, content, reasoning, num_calls in _answers(row):
        words = Words(source, asked, content, reasoning, len(row.tools), num_calls)
        yield (row.key, turn), words


def _answers(row: Row) -> Iterator[tuple[int, str, str, int]]:
    if row.answers:
        for answer in row.answers:
            calls = len(answer.tool_calls)
            yield answer.turn, answer.content, answer.reasoning_content, calls
        return
    said = [m for m in row.messages if m.get("role") == "assistant"]
    for turn, message in enumerate(said):
        calls = len(message.get("tool_calls") or [])
        yield turn, _text(message, "content"), _text(message, "reasoning_content"), calls


def _text(message: Json, name: str) -> str:
    value = message.get(name)
    return value if isinstance(value, str) else ""


def _place(source: str) -> str:
    path, colon, line = source.rpartition(":")
    return path if colon and line.isdigit() else source
