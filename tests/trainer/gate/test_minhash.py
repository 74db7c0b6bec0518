"""Near-duplicates: the estimate is the Jaccard similarity, and those alike are found."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.gate.minhash import SHINGLE, NearDuplicates, signature, similarity
from trainer.tokens.shards import Ids

ids_lists = st.lists(st.integers(0, 30), min_size=1, max_size=120)


def array(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def grams(ids: list[int]) -> set[tuple[int, ...]]:
    size = min(SHINGLE, len(ids))
    return {tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)}


def jaccard(one: list[int], other: list[int]) -> float:
    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def estimate(one: list[int], other: list[int]) -> float:
    return similarity(signature(array(one)), signature(array(other)))


def changed(ids: list[int], num_changes: int, random: np.random.Generator) -> list[int]:
    other = list(ids)
    for at in random.choice(len(ids), num_changes, replace=False):
        other[at] = int(random.integers(1000, 2000))
    return other


@settings(deadline=None, max_examples=200)
@given(ids_lists, ids_lists)
@example([0], [0, 0])
def test_the_estimate_is_within_six_standard_errors_of_the_exact_similarity(
    one: list[int], other: list[int]
) -> None:
    assert abs(estimate(one, other) - jaccard(one, other)) <= 6 * 0.0625


@settings(deadline=None, max_examples=50)
@given(ids_lists)
def test_what_is_equal_is_estimated_so(ids: list[int]) -> None:
    assert estimate(ids, list(ids)) == 1.0


def test_the_estimate_is_right_on_average_at_every_similarity() -> None:
    random = np.random.default_rng(0)
    errors: dict[int, list[float]] = {}

    for _ in range(40):
        ids = random.integers(0, 1000, 200).tolist()
        for num_changes in (1, 4, 10, 25, 60):
            other = changed(ids, num_changes, random)
            errors.setdefault(num_changes, []).append(estimate(ids, other) - jaccard(ids, other))

    # 40 estimates of a standard error of 0.0625 at most: 0.01 on average, four times that allowed.
    assert all(abs(float(np.mean(e))) < 0.04 for e in errors.values())


def test_answers_are_counted_as_exact_comparison_counts_them() -> None:
    random = np.random.default_rng(1)
    fresh = [random.integers(0, 1000, 300).tolist() for _ in range(150)]
    near = [changed(fresh[i], 2, random) for i in range(0, 150, 3)]  # similarity 0.93
    far = [changed(fresh[i], 25, random) for i in range(1, 150, 3)]  # 0.5 or less
    texts = [*fresh, *near, *far]
    random.shuffle(texts)
    seen = NearDuplicates(max_kept=1000)

    found = [seen.add(array(ids)) for ids in texts]

    sets = [grams(ids) for ids in texts]
    exact = [
        any(len(own & other) > 0.85 * len(own | other) for other in sets[:at])
        for at, own in enumerate(sets)
    ]
    assert found == exact
    assert (seen.num_seen, seen.num_repeats) == (250, sum(exact))
    assert sum(exact) == 50


def test_a_full_memory_still_knows_what_it_kept_and_grows_no_more() -> None:
    random = np.random.default_rng(2)
    texts = [array(random.integers(0, 1000, 60).tolist()) for _ in range(30)]
    seen = NearDuplicates(max_kept=20)

    firsts = [seen.add(ids) for ids in texts]
    again = [seen.add(ids) for ids in texts]

    assert firsts == [False] * 30
    assert again == [True] * 20 + [False] * 10
    assert seen.is_full
