"""Which samples share a row, and which rows a microbatch: lengths in, places out.

Used by intake.py for one window of samples after another. A window is as many samples as a given
number of rows has room for, so that its end depends on lengths alone and never on what was drawn.
Packed rows are filled best fit first, the longest samples first; the last rows of a window, and its
last microbatch, are what stays emptier. Padded rows hold a sample each and meet others of like
length. Invariant: a window's microbatches hold each of its samples exactly once, and are a pure
function of lengths, recipe and random state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.online.batches import DataRecipe

Lengths = npt.NDArray[np.int32]  # of samples, after cutting: 1 to max_len
Rows = list[list[int]]  # of each row its samples, by their place in the window

SORTED_TOGETHER = 16  # padded microbatches: little padding, still shuffled


def window_len(lengths: Lengths, recipe: DataRecipe, *, is_all: bool) -> int | None:
    """How many of the samples, from the first one on, make a window.

    None: more must be known first, unless there are no more (`is_all`).
    """
    num_rows = rows_of_window(recipe)
    if not recipe.packed:
        enough = len(lengths) >= num_rows
        return min(num_rows, len(lengths)) if enough or is_all else None
    num_fitting = int(np.searchsorted(lengths.cumsum(), num_rows * recipe.max_len, side="right"))
    return None if num_fitting == len(lengths) and not is_all else num_fitting


def rows_of_window(recipe: DataRecipe) -> int:
    """Whole microbatches of them, at least one."""
    return max(1, recipe.buffer_rows // recipe.batch_size) * recipe.batch_size


def num_microbatches(lengths: Lengths, recipe: DataRecipe) -> int:
    """Of a window with these samples."""
    num_rows = num_packed_rows(lengths, recipe.max_len) if recipe.packed else len(lengths)
    return -(-num_rows // recipe.batch_size)


def arrange(lengths: Lengths, recipe: DataRecipe, random: np.random.Generator) -> list[Rows]:
    """The microbatches of a window, in the order of use."""
    shuffled = random.permutation(len(lengths))
    size = recipe.batch_size
    if not recipe.packed:
        batches = _alike(shuffled, lengths, size)
        return [batches[i] for i in random.permutation(len(batches))]
    packed = pack(lengths[shuffled].tolist(), recipe.max_len)
    rows = [shuffled[random.permutation(row)].tolist() for row in packed]
    order = random.permutation(len(rows)).tolist()
    return [[rows[i] for i in order[at : at + size]] for at in range(0, len(order), size)]


def _alike(shuffled: npt.NDArray[np.int64], lengths: Lengths, size: int) -> list[Rows]:
    """One sample a row, rows of like length together."""
    batches = []
    for start in range(0, len(shuffled), size * SORTED_TOGETHER):
        part = shuffled[start : start + size * SORTED_TOGETHER]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [
            [[i] for i in part[at : at + size].tolist()] for at in range(0, len(part), size)
        ]
    return batches


def num_packed_rows(lengths: Lengths, row_len: int) -> int:
    """How many rows `pack` needs; the order of the lengths makes no difference."""
    return len(pack(lengths.tolist(), row_len))


def pack(lengths: Sequence[int], row_len: int) -> Rows:
    """Rows of at most `row_len` tokens: the longest samples first, each into the row that it fills
    best.

    The rows with room are found by one integer, of which bit r says that a row has room r.
    """
    rows: Rows = []
    by_room: list[list[int]] = [[] for _ in range(row_len + 1)]
    rooms = 0
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[sample]
        fitting = rooms >> length
        if not fitting:
            row, room = len(rows), row_len
            rows.append([])
        else:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        rows[row].append(sample)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
