from __future__ import annotations

import hashlib

from producer.known import NO_LINES, KnownLines, high_halves


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


def test_exactly_the_lines_given_are_known() -> None:
    digests = [digest(number).hex() for number in range(1000)]

    known = KnownLines(high_halves([*digests[:500], "", *digests[500:]]))

    assert len(known) == 1000
    assert all(digest(number) in known for number in range(1000))
    assert not any(digest(number) in known for number in range(1000, 2000))


def test_many_are_told_apart_at_once() -> None:
    known = KnownLines(high_halves(digest(number).hex() for number in range(0, 1000, 2)))

    assert known.which([digest(number) for number in range(1000)]) == [True, False] * 500
    assert known.which([]) == []
    assert NO_LINES.which([digest(1)]) == [False]


def test_the_least_and_the_greatest_digest_are_told_apart() -> None:
    known = KnownLines(high_halves(["00" * 16, "ff" * 16]))

    assert b"\0" * 16 in known
    assert b"\xff" * 16 in known
    assert b"\xff" * 7 + b"\xfe" + b"\xff" * 8 not in known
    assert b"\0" * 7 + b"\x01" + b"\0" * 8 not in known


def test_nothing_is_known_of_no_lines() -> None:
    assert len(NO_LINES) == 0
    assert digest(1) not in NO_LINES
