"""Prompt files -> rows, one at a time.

Reads JSON Lines from <- files (plain, gzip or zstd, told apart by their first bytes), stdin ("-")
or Python mappings; hands (source, row) to -> conversations.py. Memory stays flat at any file size.
A line ends in "\\n" and in nothing else: U+2028, U+0085 and vertical tabs are text. Every line that
is not blank comes out once, as a row or as a Refusal; a file that can't be read ends the call.
"""

from __future__ import annotations

import json
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import orjson
import zstandard

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json, Refusal

STDIN = "-"
EXCERPT_CHARS = 200
CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 26  # beyond it the file surely is no JSON Lines

_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# Any JSON escape; group 1 is half of a surrogate pair that lacks its other half.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)

Input = str | Path | Mapping[str, Any]
SourcedRow = tuple[str, Json | Refusal]


def read_rows(inputs: Iterable[Input]) -> Iterator[SourcedRow]:
    """(source, row) of every line of every file, and of every mapping, in order.

    The source is "path:line", or "row:number" for a mapping. Raises BadInput; for a missing file
    before the first row, unless `inputs` can be walked only once.
    """
    if isinstance(inputs, Sequence):
        check_files(inputs)
    num_mappings = 0
    for item in inputs:
        if isinstance(item, Mapping):
            num_mappings += 1
            yield _row_of_mapping(item, f"row:{num_mappings}")
        else:
            check_files([item])
            yield from _rows_of_file(str(item))


def check_files(inputs: Iterable[Input]) -> None:
    """Raise BadInput for the first path that can't be a prompt file."""
    for item in inputs:
        if isinstance(item, Mapping) or str(item) == STDIN:
            continue
        name = str(item).encode(errors="replace").decode()
        if name != str(item):
            raise BadInput(f"{name}: the file's name is not UTF-8: rename it")
        try:
            mode = Path(item).stat().st_mode
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            raise BadInput(f"{item}: {'no such file' if is_gone else error.strerror}") from error
        if stat.S_ISDIR(mode):
            raise BadInput(f"{item}: is a folder: name the files in it")


def parse_line(line: bytes, source: str) -> SourcedRow:
    """One line as a row; halves of surrogate pairs become U+FFFD."""
    try:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = orjson.loads(_ESCAPE.sub(_without_lone_surrogate, line))
    except orjson.JSONDecodeError as error:
        return source, _refusal(source, "malformed_json", str(error), line)
    if not isinstance(row, dict):
        detail = f"a row must be an object, this is a {type(row).__name__}"
        return source, _refusal(source, "not_an_object", detail, line)
    return source, row


def _row_of_mapping(mapping: Mapping[str, Any], source: str) -> SourcedRow:
    try:
        line = json.dumps(dict(mapping)).encode()  # escapes lone surrogates, which orjson refuses
    except (TypeError, ValueError, RecursionError) as error:
        excerpt = repr(mapping).encode(errors="replace")
        return source, _refusal(source, "malformed_json", f"not JSON: {error}", excerpt)
    return parse_line(line, source)


def _rows_of_file(path: str) -> Iterator[SourcedRow]:
    name = "stdin" if path == STDIN else path
    with _opened(path) as file:
        for number, line in enumerate(_lines(_plain_chunks(file, name), name), start=1):
            # One mark may stand before every line where files were joined.
            line = line.removeprefix(_BOM).strip()
            if line:
                yield parse_line(line, f"{name}:{number}")


def _lines(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise BadInput(f"{name}: a line of over {MAX_LINE_BYTES >> 20} MiB: not JSON Lines")
    yield rest


class _Decoder(Protocol):
    """What zlib's and zstandard's decompression objects have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _plain_chunks(file: IO[bytes], name: str) -> Iterator[bytes]:
    first = file.read(CHUNK_BYTES)
    chunks = _chain(first, file)
    if first.startswith(_GZIP_MAGIC):
        return _decompressed(chunks, lambda: zlib.decompressobj(wbits=31), name)
    if first.startswith(_ZSTD_MAGIC):
        return _decompressed(chunks, lambda: zstandard.ZstdDecompressor().decompressobj(), name)
    return chunks


def _chain(chunk: bytes, file: IO[bytes]) -> Iterator[bytes]:
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def _decompressed(
    chunks: Iterable[bytes], new_decoder: Callable[[], _Decoder], name: str
) -> Iterator[bytes]:
    """Any number of compressed frames, one after the other; the last must be complete."""
    decoder = new_decoder()
    try:
        for chunk in chunks:
            while chunk:
                if decoder.eof:
                    decoder = new_decoder()
                yield decoder.decompress(chunk)
                chunk = decoder.unused_data
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadInput(f"{name}: damaged: {error}") from error
    if not decoder.eof:
        raise BadInput(f"{name}: cut short: the compressed data has no end")


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise BadInput(f"{path}: can't be read: {error.strerror}") from error


def _without_lone_surrogate(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match[1] else match[0]


def _refusal(source: str, reason: str, detail: str, line: bytes) -> Refusal:
    return Refusal(source, reason, detail, line.decode(errors="replace")[:EXCERPT_CHARS])
