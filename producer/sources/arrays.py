"""A JSON array of rows -> items, read as a stream.

Reads the bytes of <- places.py; hands (source, row) to -> inputs.py. Rows come out before the end
of the array is seen, so a damaged one still gives those before the damage, then names the element.
ijson knows no halves of surrogate pairs: they are mended in the text, as for JSON Lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import ijson
import orjson

from dflash_workers.contract.errors import BadInput
from producer.sources.rows import (
    BOM,
    MAX_ROW_BYTES,
    SourcedItem,
    mend_surrogates,
    not_an_object,
)

READ_BYTES = 1 << 16


def begins_array(head: bytes) -> bool:
    """Whether a file with this beginning is a JSON array."""
    return head.removeprefix(BOM).lstrip().startswith(b"[")


def read_array(stream: IO[bytes], name: str) -> Iterator[SourcedItem]:
    """Every element; those that are no objects as refusals. Raises BadInput at damage."""
    text = _ArrayText(stream)
    elements = ijson.items(text, "item", use_float=True, buf_size=READ_BYTES)
    number = 0
    try:
        for number, row in enumerate(elements, start=1):
            text.num_bytes = 0
            source = f"{name}#{number}"
            if isinstance(row, dict):
                yield source, row
            else:
                yield source, not_an_object(source, row, orjson.dumps(row))
    except _TooLong as error:
        raise BadInput(
            f"{name}: element {number + 1}: over {MAX_ROW_BYTES >> 20} MiB: no row"
        ) from error
    except ijson.JSONError as error:
        (what, *_) = str(error).split("\n")
        raise BadInput(f"{name}: element {number + 1}: damaged JSON array: {what}") from error


class _TooLong(Exception):
    """An element has no end."""


class _ArrayText:
    """The array's text without halves of surrogate pairs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.num_bytes = 0  # read since this was last set to 0
        self._stream = stream
        self._rest = b""

    def read(self, num_bytes: int) -> bytes:
        """About `num_bytes` more; b"" at the end only."""
        while True:
            chunk = self._stream.read(num_bytes)
            text = self._rest + chunk
            # No escape goes on behind a quotation mark: the place to cut.
            cut = text.rfind(b'"') + 1 if chunk else len(text)
            self._rest = text[cut:]
            self.num_bytes += len(chunk)
            if self.num_bytes > MAX_ROW_BYTES:
                raise _TooLong
            if cut or not chunk:
                return mend_surrogates(text[:cut])
