"""Where ids begin in a text: counting bytes says what tokenizers' own offsets say."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tests.trainer.tokens.targets import PATTERN
from trainer.tokens.encoder import Encoder

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ċ", "Ċ"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("Ġ", "Ġ"), ("Ã", "©"), ("ð", "Ł")]
PIECES = ("the", " the", " ", "\n", "\n\n", "é", "e\u0301", "🙂", "<|a|>", " <|b|> ", "x", "1", "▁")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(**parts: Any) -> Tokenizer:
    """As Qwen's, with a few merges; `parts` take others' place."""
    vocab = {letters: number for number, letters in enumerate(ALPHABET)}
    for left, right in MERGES:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), BYTES_ONLY]
    )
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken("<|a|>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("<|b|>", normalized=False)])
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|b|>", lstrip=True, rstrip=True)])
    return tokenizer


def dropping() -> Tokenizer:
    spaces = pre_tokenizers.Split(" ", "removed")
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([spaces, BYTES_ONLY]))


def prefixing() -> Tokenizer:
    return byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))


def metaspace() -> Tokenizer:
    vocab = {letter: number for number, letter in enumerate(["<unk>", *"thex1\né🙂▁<|ab>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def lowercasing() -> Tokenizer:
    return byte_level(normalizer=normalizers.Lowercase())


def composing() -> Tokenizer:
    return byte_level(normalizer=normalizers.NFC())


def trimming() -> Tokenizer:
    return byte_level(post_processor=processors.ByteLevel(trim_offsets=True))


MAKERS: list[Callable[[], Tokenizer]] = [
    *(byte_level, composing, trimming),
    *(swallowing, dropping, prefixing, metaspace, lowercasing),
]


@cache
def made(make: Callable[[], Tokenizer]) -> tuple[Encoder, Tokenizer]:
    """The encoder, and the same tokenizer without anything that trims its offsets."""
    parts = json.loads(make().to_str()) | {"post_processor": None}
    return Encoder(make()), Tokenizer.from_str(json.dumps(parts))


def by_offsets(found: Any, start: int, end: int) -> tuple[int, int] | None:
    """The slow, obvious way: the first id that holds the character, if it begins there."""
    offsets = found.offsets
    first = next((n for n, (a, b) in enumerate(offsets) if a <= start < b), None)
    if first is None or offsets[first][0] != start:
        return None
    return first, next((n for n, (a, b) in enumerate(offsets) if a <= end < b), len(offsets))


@pytest.mark.parametrize("make", MAKERS)
@settings(deadline=None, max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_ids_and_places_are_the_tokenizers_own(
    make: Callable[[], Tokenizer], texts: list[str]
) -> None:
    encoder, plain = made(make)

    for text, encoded in zip(texts, encoder.encode(texts), strict=True):
        own = plain.encode(text, add_special_tokens=False)
        assert encoded.ids.tolist() == own.ids == encoder.ids(text)
        for start, end in pairwise(range(len(text) + 1)):
            assert encoded.span(start, end) == by_offsets(own, start, end)
            assert encoded.span(start, len(text)) == by_offsets(own, start, len(text))


@pytest.mark.parametrize("make", [byte_level, composing, trimming])
def test_bytes_are_counted_where_ids_stand_for_bytes(make: Callable[[], Tokenizer]) -> None:
    (encoded,) = made(make)[0].encode(["the é 🙂<|a|>\n\n"])

    assert type(encoded).__name__ == "_ByBytes"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (composing, "e\u0301"),
        (swallowing, "x <|b|> x"),
        (dropping, "x x"),
        (prefixing, "x"),
        (metaspace, "x x"),
        (lowercasing, "x"),
    ],
)
def test_offsets_are_asked_where_they_do_not(make: Callable[[], Tokenizer], text: str) -> None:
    (encoded,) = made(make)[0].encode([text])

    assert type(encoded).__name__ == "_ByCharacters"
