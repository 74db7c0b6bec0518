"""Inputs read to the end, each row parsed as a run would."""

from __future__ import annotations

from dflash_workers.contract.records import Json, Refusal
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import Input, parse_line, read_items

SourcedRow = tuple[str, Json | Refusal]


def read(*inputs: Input, settings: Settings | None = None) -> list[SourcedRow]:
    """(source, row) of everything."""
    return [
        (source, parse_line(item, source) if isinstance(item, bytes) else item)
        for source, item in read_items(list(inputs), settings or Settings())
    ]


def rows(*inputs: Input, settings: Settings | None = None) -> list[Json | Refusal]:
    """The rows alone."""
    return [row for _, row in read(*inputs, settings=settings)]


def refusal(*inputs: Input) -> Refusal:
    """The one row there is, which must be refused."""
    (row,) = rows(*inputs)
    assert isinstance(row, Refusal)
    return row
