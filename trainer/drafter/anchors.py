"""Where blocks start: the anchors of a sample, or of a packed row of samples, in one epoch.

Used by online/batches.py. An anchor is a token that the target generated and that another generated
token follows: its block asks for that next token and the ones after it. Every such place gets a
random key, a pure function of (seed, epoch, sample): of no rank, order, machine or draw before it,
so that a resumed run draws the same. The places with the smallest keys are the anchors; keys of
different samples compare, so a packed row draws evenly from all its places. Source: arXiv
2602.06036, section 4.2 (random anchors beat fixed blocks, table 13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NO_ANCHOR = -1  # fills the slots of a row that has fewer places than slots
Draw = tuple[int, int, str]  # seed, epoch, sample id


@dataclass(frozen=True, slots=True)
class Document:
    """A sample in a packed row; of its `length` ids those from `prompt_len` on carry loss."""

    start: int  # its first place in the row
    prompt_len: int
    length: int
    draw: Draw


def draw_anchors(
    prompt_len: int, length: int, *, num_anchors: int, draw: Draw
) -> npt.NDArray[np.int64]:
    """`num_anchors` slots of one sample: different places, ascending, then NO_ANCHOR."""
    return draw_packed_anchors([Document(0, prompt_len, length, draw)], num_anchors)


def draw_packed_anchors(documents: Sequence[Document], num_anchors: int) -> npt.NDArray[np.int64]:
    """`num_anchors` slots of a row: different places, ascending, then NO_ANCHOR."""
    slots = np.full(num_anchors, NO_ANCHOR, dtype=np.int64)
    if not documents:
        return slots
    places, keys = (np.concatenate(x) for x in zip(*map(_keyed_places, documents), strict=True))
    chosen = np.sort(places[np.argsort(keys, kind="stable")[:num_anchors]])
    slots[: len(chosen)] = chosen
    return slots


def _keyed_places(document: Document) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    places = document.start + np.arange(document.prompt_len, document.length - 1, dtype=np.int64)
    # Not hash(): it differs from process to process.
    digest = hashlib.blake2b(repr(document.draw).encode(), digest_size=16).digest()
    return places, np.random.default_rng(int.from_bytes(digest)).random(len(places))
