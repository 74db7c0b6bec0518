"""Texts -> ids, and which ids lie between two places of a text.

Asked by text_road.py for each batch of texts. Offsets of tokenizers' own count characters, and to
make them takes a quarter of the instructions of `encode_batch`. Of a byte-level tokenizer each id
stands for a fixed number of bytes, so that sums say where every id begins. Nothing in such a
tokenizer adds bytes; so where the sum is the text's length, nothing was left out either, and the
places are exact. Of other tokenizers, and of a text that the tokenizer normalizes or takes spaces
from, its own offsets are asked. Invariant: both ways give the same.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer, pre_tokenizers

from dflash_workers.contract.records import Json
from trainer.tokens.shards import Ids

# What cuts a text into pieces and adds nothing to them.
_CUTTERS = ("Split", "Digits", "ByteLevel")


class Encoded(Protocol):
    """A text's ids."""

    @property
    def ids(self) -> Ids:
        """All of them."""

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Where the ids of `text[start:end]` begin and end; None where no id begins at `start`.

        An id that straddles `end` is left out.
        """


class Encoder:
    """Encodes as a tokenizer does that is asked for no special tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        """A copy of the tokenizer, whose own state is left alone."""
        parts = orjson.loads(backend.to_str())
        # A post-processor may trim offsets; its other work is to add special tokens.
        parts |= {"post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = Tokenizer.from_str(orjson.dumps(parts).decode())
        self._num_bytes = _bytes_of_ids(parts)
        self._normalizes = parts["normalizer"] is not None

    def ids(self, text: str) -> list[int]:
        """Of a text by itself."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """In the texts' order."""
        if self._num_bytes is None:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            return [_ByCharacters(encoding) for encoding in found]
        quick = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [
            self._by_bytes(text, encoding.ids, self._num_bytes)
            or _ByCharacters(self._tokenizer.encode(text, add_special_tokens=False))
            for text, encoding in zip(texts, quick, strict=True)
        ]

    def _by_bytes(
        self, text: str, ids: list[int], num_bytes: npt.NDArray[np.int64]
    ) -> Encoded | None:
        """None where the ids don't stand for just the text's bytes."""
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return None
        found = np.array(ids, dtype=np.int32)
        ends = np.cumsum(num_bytes[found])
        if len(found) and ends[-1] != _num_bytes(text):
            return None
        return _ByBytes(text, found, ends)


@dataclass(frozen=True, slots=True)
class _ByBytes:
    text: str
    ids: Ids
    ends: npt.NDArray[np.int64]  # bytes of the text up to each id's end

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        before = _num_bytes(self.text[:start])
        first = int(np.searchsorted(self.ends, before, side="right"))
        if first == len(self.ids) or before != (self.ends[first - 1] if first else 0):
            return None
        after = before + _num_bytes(self.text[start:end])
        return first, int(np.searchsorted(self.ends, after, side="right"))


class _ByCharacters:
    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.ids: Ids = np.array(encoding.ids, dtype=np.int32)

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        first = self._encoding.char_to_token(start)
        if first is None or self._encoding.token_to_chars(first)[0] != start:
            return None
        last = self._encoding.char_to_token(end)  # None behind the last character
        return first, len(self.ids) if last is None else last


def _bytes_of_ids(parts: Json) -> npt.NDArray[np.int64] | None:
    """How many bytes of a text each id stands for; None where that is not fixed."""
    model, normalizer = parts["model"], parts["normalizer"]
    if model["type"] != "BPE" or (normalizer or {"type": "NFC"})["type"] != "NFC":
        return None
    cutters = _cutters(parts["pre_tokenizer"])
    kinds = [cutter["type"] for cutter in cutters]
    adds_spaces = any(cutter.get("add_prefix_space") for cutter in cutters)
    if kinds.count("ByteLevel") != 1 or not set(kinds) <= set(_CUTTERS) or adds_spaces:
        return None
    vocab: dict[str, int] = model["vocab"]
    if not set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys():
        return None  # some bytes have no id
    sizes = {number: len(letters) for letters, number in vocab.items()}  # a letter is a byte
    sizes |= {token["id"]: _num_bytes(token["content"]) for token in parts["added_tokens"]}
    found = np.zeros(max(sizes) + 1, np.int64)
    found[list(sizes)] = list(sizes.values())
    return found


def _cutters(pre_tokenizer: Json | None) -> list[Json]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    return [pre_tokenizer]


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
