"""How samples fill rows."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.online.batches import DataRecipe
from trainer.online.packing import Lengths, arrange, num_microbatches, pack, window_len

ROW_LEN = 4096


def recipe(*, packed: bool = True, buffer_rows: int = 1024) -> DataRecipe:
    return DataRecipe(
        batch_size=4, num_anchors=8, max_len=ROW_LEN, packed=packed, buffer_rows=buffer_rows
    )


def lognormal(num: int, *, mean: float = 1600, variation: float = 1.0) -> Lengths:
    """Lengths of a fleet's answers, cut at the row."""
    sigma = np.sqrt(np.log(1 + variation**2))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.clip(drawn, 20, ROW_LEN).astype(np.int32)


@pytest.mark.parametrize(("mean", "variation"), [(1600, 1.0), (2000, 0.7), (600, 1.2)])
def test_less_than_three_per_cent_of_packed_rows_is_padding(mean: float, variation: float) -> None:
    lengths = lognormal(20_000, mean=mean, variation=variation)
    num_tokens = num_batches = at = 0

    while num := window_len(lengths[at:], recipe(), is_all=False):
        num_tokens += int(lengths[at : at + num].sum())
        num_batches += num_microbatches(lengths[at : at + num], recipe())
        at += num

    waste = 1 - num_tokens / (num_batches * 4 * ROW_LEN)
    assert at > 4_000
    assert 0 <= waste < 0.03


@given(st.lists(st.integers(1, 50), max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_sample_is_packed_once_and_no_row_overflows(lengths: list[int]) -> None:
    rows = pack(lengths, 50)

    assert Counter(itertools.chain(*rows)) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 50 for row in rows)
    # No two rows could be one: best fit would have put the shorter into the longer.
    filled = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > 50


@pytest.mark.parametrize("packed", [False, True])
def test_an_arrangement_holds_each_sample_once_in_microbatches_of_full_size(packed: bool) -> None:
    lengths = lognormal(203)
    shape = recipe(packed=packed)

    batches = arrange(lengths, shape, np.random.default_rng([1, 2, 3]))

    rows = [row for batch in batches for row in batch]
    assert Counter(itertools.chain(*rows)) == Counter(range(203))
    assert len(batches) == num_microbatches(lengths, shape)
    assert sorted(len(batch) for batch in batches)[1:] == [4] * (len(batches) - 1)
    assert max(len(row) for row in rows) == 1 or packed


@pytest.mark.parametrize("packed", [False, True])
def test_an_arrangement_depends_on_the_random_state_alone(packed: bool) -> None:
    lengths = lognormal(100)

    one, same, other = (
        arrange(lengths, recipe(packed=packed), np.random.default_rng(seed)) for seed in (1, 1, 2)
    )

    assert one == same
    assert one != other


def test_padded_microbatches_hold_samples_of_like_length() -> None:
    lengths = lognormal(1024)

    batches = arrange(lengths, recipe(packed=False), np.random.default_rng(0))

    widths = [max(lengths[i] for (i,) in batch) * len(batch) for batch in batches]
    assert lengths.sum() / sum(widths) > 0.85


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_ends_where_the_same_samples_end_it_whatever_is_known_behind(packed: bool) -> None:
    lengths = lognormal(2000)
    shape = recipe(packed=packed, buffer_rows=64)

    num = window_len(lengths, shape, is_all=False)

    assert num is not None
    assert num == window_len(lengths[: num + 1], shape, is_all=False)
    assert num == window_len(lengths[:num], shape, is_all=True)
    assert window_len(lengths[: num - 1], shape, is_all=False) is None


def test_a_window_that_ends_the_data_takes_all_that_is_left() -> None:
    assert window_len(lognormal(10), recipe(), is_all=True) == 10
    assert window_len(lognormal(0), recipe(), is_all=True) == 0
    assert window_len(lognormal(10), recipe(), is_all=False) is None
