"""Rows read one after the other in this process: what every faster way has to agree with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from producer.candidates import Outcome, RowReader
from producer.known import NO_LINES, KnownLines
from producer.rules import Rules
from producer.sources.inputs import SourcedItem


def read_candidates(
    items: Iterable[SourcedItem], rules: Rules, known_lines: KnownLines = NO_LINES
) -> Iterator[Outcome]:
    """The outcomes of each item, in order."""
    return RowReader(rules, known_lines).read(items)
