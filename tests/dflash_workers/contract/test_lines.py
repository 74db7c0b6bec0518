"""Lines: what is dumped is loaded again, whatever the text in it; what is damaged is corrupt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.lines import (
    compress,
    compress_each,
    decompress,
    dump,
    dump_lines,
    load,
    load_lines,
)
from dflash_workers.contract.records import BatchMessage, Rejection

texts = st.text(st.characters(exclude_categories=["Cs"]))
rejections = st.builds(Rejection, key=texts, id=texts, reason=texts, detail=texts)


@settings(deadline=None)
@given(st.lists(rejections))
def test_any_text_survives_the_way_to_lines_and_back(records: list[Rejection]) -> None:
    body = dump_lines(records)

    assert load_lines(Rejection, body) == records
    assert body.count(b"\n") == len(records)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\r", "\x1e"])
def test_only_a_newline_ends_a_line(separator: str) -> None:
    record = Rejection("k", "i", "r", f"one{separator}line")

    assert load_lines(Rejection, dump_lines([record, record])) == [record, record]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}{}"])
def test_what_is_no_record_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        load(BatchMessage, body)


def test_a_line_cut_short_is_corrupt() -> None:
    body = dump_lines([BatchMessage("run", 1, "b")] * 2)

    with pytest.raises(Corrupt):
        load_lines(BatchMessage, body[:-10])


def test_keys_stand_in_the_order_of_the_fields() -> None:
    assert dump(BatchMessage("r", 2, "b")) == b'{"run":"r","segment":2,"batch":"b","schema":2}'


@settings(deadline=None)
@given(st.binary())
def test_what_is_compressed_is_decompressed(body: bytes) -> None:
    assert decompress(compress(body)) == body


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1)))
def test_bodies_compressed_together_give_the_frames_of_each_alone(bodies: list[bytes]) -> None:
    assert compress_each(bodies) == [compress(body) for body in bodies]


def test_a_compressed_object_cut_short_or_with_a_tail_is_corrupt() -> None:
    body = compress(b"some text, and some more text" * 20)

    for damaged in [*(body[:n] for n in range(len(body))), body + b"x", b"plain text"]:
        with pytest.raises(Corrupt):
            decompress(damaged)
