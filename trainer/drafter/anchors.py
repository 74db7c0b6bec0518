"""Where blocks start: the anchors of one sample in one epoch.

Used by online/batches.py, one call per sample and epoch. An anchor is a token that the target
generated and that another generated token follows: its block asks for that next token and the ones
after it. Anchors are drawn anew in each epoch, and are a pure function of (seed, epoch, sample):
independent of batch, order, machine and of what was drawn before, so that a resumed run draws the
same. Source: arXiv 2602.06036, section 4.2 (random anchors beat fixed blocks, table 13).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

NO_ANCHOR = -1  # fills the slots of a sample that has fewer places than slots


def draw_anchors(
    prompt_len: int, length: int, *, num_anchors: int, draw: tuple[int, int, str]
) -> npt.NDArray[np.int64]:
    """`num_anchors` slots: different positions in ascending order, then NO_ANCHOR.

    `draw` is (seed, epoch, sample id). Of a sample's `length` ids those from `prompt_len` on carry
    loss.
    """
    slots = np.full(num_anchors, NO_ANCHOR, dtype=np.int64)
    places = np.arange(prompt_len, length - 1)
    if len(places) > num_anchors:
        places = np.sort(_generator(draw).choice(places, num_anchors, replace=False))
    slots[: len(places)] = places
    return slots


def _generator(draw: tuple[int, int, str]) -> np.random.Generator:
    # Not hash(): it differs from process to process.
    digest = hashlib.blake2b(repr(draw).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))
