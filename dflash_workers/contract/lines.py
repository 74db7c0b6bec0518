"""Records as JSON Lines, plain or zstd: the form of every plan, data and refusal object.

Lines end in "\\n" and in nothing else: U+2028, U+0085 and vertical tabs are ordinary text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import orjson
import zstandard

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.records import decode

ZSTD_LEVEL = 3
_SMALL = 1 << 16  # bytes; of these a thread's compressor stays, a few hundred KB

Record = TypeVar("Record")


def dump(record: Any) -> bytes:
    """One record as one JSON object, keys in field order."""
    return orjson.dumps(record)


def load(record: type[Record], body: bytes) -> Record:
    """Inverse of dump. Raises Corrupt."""
    try:
        return decode(record, orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{record.__name__}: not JSON: {error}") from error


def dump_lines(records: Iterable[Any]) -> bytes:
    """One line per record."""
    return b"".join(dump(r) + b"\n" for r in records)


def load_lines(record: type[Record], body: bytes) -> list[Record]:
    """Inverse of dump_lines. Raises Corrupt."""
    return [load(record, line) for line in body.split(b"\n") if line]


class _Kept(threading.local):
    """Each thread's own: to make one and throw it away takes longer than a small body."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)


_kept = _Kept()


def compress(body: bytes) -> bytes:
    """zstd, with the content size in the frame's header."""
    if len(body) <= _SMALL:
        return _kept.compressor.compress(body)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)


def compress_each(bodies: list[bytes]) -> list[bytes]:
    """A frame for each body, the same as `compress` makes.

    One call for all of them, during which other threads run: a thread that asked for the
    interpreter after each frame would wait for it longer than it compresses.
    """
    if not bodies:
        return []
    frames = zstandard.ZstdCompressor(level=ZSTD_LEVEL).multi_compress_to_buffer([*bodies])
    return [frames[i].tobytes() for i in range(len(frames))]


def decompress(body: bytes) -> bytes:
    """Inverse of compress. Raises Corrupt."""
    try:
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"not a zstd object: {error}") from error
