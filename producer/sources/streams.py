"""An input file opened: as a stream of plain bytes, or for reading in any order.

Opens the places of <- places.py and stdin, for the readers of lines, arrays, cells and tables.
Compression is told by the first bytes, whatever the name; frames may follow one another, and the
last must be complete. Nothing is read ahead but one buffer.
"""

from __future__ import annotations

import bz2
import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
from pyarrow.fs import LocalFileSystem

from dflash_workers.contract.errors import BadInput
from producer.sources.places import Place, translated_errors

STDIN_NAME = "stdin"
BUFFER_BYTES = 1 << 18
S3_BUFFER_BYTES = 1 << 23  # each buffer is a request of its own

_GZIP_MAGIC = b"\x1f\x8b"
_BZIP2_MAGIC = b"BZh"
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")  # a frame, a skippable frame


@contextmanager
def opened_stream(place: Place) -> Iterator[io.BufferedReader]:
    """The file's bytes from the beginning on, decompressed. Pipes and devices are files too."""
    raw: Any  # Python's file or Arrow's: both serve a BufferedReader
    with ExitStack() as stack, translated_errors(place.name):
        if isinstance(place.system, LocalFileSystem):
            raw = stack.enter_context(open(place.path, "rb", buffering=0))
        else:
            raw = stack.enter_context(
                place.system.open_input_stream(
                    place.path, compression=None, buffer_size=S3_BUFFER_BYTES
                )
            )
        yield _decompressed(io.BufferedReader(raw, BUFFER_BYTES))


@contextmanager
def opened_stdin() -> Iterator[io.BufferedReader]:
    """Stdin's bytes, decompressed."""
    check_stdin()
    stdin: Any = sys.stdin.buffer
    buffered = io.BufferedReader(stdin, BUFFER_BYTES)
    try:
        with translated_errors(STDIN_NAME):
            yield _decompressed(buffered)
    finally:
        buffered.detach()  # or it would close stdin with itself


def check_stdin() -> None:
    """Raise BadInput where there is no stdin (`<&-`)."""
    if sys.stdin is None or sys.stdin.closed:
        raise BadInput("stdin is closed: name a file, or pipe rows into this command")


@contextmanager
def opened_for_jumps(place: Place) -> Iterator[pa.NativeFile]:
    """The file's bytes in any order, as they are."""
    with translated_errors(place.name), place.system.open_input_file(place.path) as file:
        yield file


def _decompressed(stream: io.BufferedReader) -> io.BufferedReader:
    head = stream.peek(4)
    plain: Any
    if head.startswith(_GZIP_MAGIC):
        plain = gzip.GzipFile(fileobj=stream)
    elif head.startswith(_BZIP2_MAGIC):
        plain = bz2.BZ2File(stream)
    elif head.startswith(_ZSTD_MAGICS):
        # Of the two readers in reach, the one that notices a frame cut short.
        plain = pa.CompressedInputStream(stream, "zstd")
    else:
        return stream
    return io.BufferedReader(plain, BUFFER_BYTES)
