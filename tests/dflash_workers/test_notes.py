"""Notes survive being packed, and say no more than they must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.records import Answer
from dflash_workers.notes import Ended, Partial, digest_of, extended, pack, rank_of, unpack

ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
partials = st.builds(
    Partial,
    asked_digest=ids.map(digest_of),
    turn=st.integers(0, 100),
    seed=st.integers(0, 2**31 - 1),
    output_ids=ids,
    segments=st.lists(st.integers(1, 50), max_size=3),
    num_asked=st.integers(1, 2),
    latency_s=st.floats(0, 1e6),
)


@given(partials)
def test_a_partial_note_is_read_back_as_it_was(partial: Partial) -> None:
    row = pack(partial)

    assert unpack(row) == partial
    assert int(row.partition(b":")[0]) == rank_of(partial)


@given(ids, ids)
def test_a_finished_note_is_read_back_without_its_text_and_prompt(
    asked: list[int], output_ids: list[int]
) -> None:
    said = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    facts = Answer(1, [], output_ids, [len(output_ids)], "", "", [], "stop", 3, 0.5, 7, {"n": 1})
    answer = Answer(
        1, asked, output_ids, [len(output_ids)], "words", "Hm.", [said], "stop", 3, 0.5, 7, {"n": 1}
    )

    assert unpack(pack(Ended(digest_of(asked), answer))) == Ended(digest_of(asked), facts)


@given(partials, partials)
def test_of_two_partials_the_later_asking_stays_then_the_longer(a: Partial, b: Partial) -> None:
    order_a, order_b = ((p.num_asked, len(p.output_ids)) for p in (a, b))

    assert (rank_of(a) < rank_of(b)) == (order_a < order_b)
    assert rank_of(a) > 0


@given(partials, ids)
def test_a_piece_more_makes_the_whole_longer_by_it(partial: Partial, piece: list[int]) -> None:
    whole = extended(partial, piece, 1.0)

    assert whole.output_ids == partial.output_ids + piece
    assert whole.segments == partial.segments + ([len(piece)] if piece else [])
    assert whole.latency_s == partial.latency_s + 1.0


@given(ids, ids)
def test_a_digest_tells_questions_apart(a: list[int], b: list[int]) -> None:
    assert (digest_of(a) == digest_of(b)) == (a == b)
