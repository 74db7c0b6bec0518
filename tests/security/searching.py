"""Finds a secret in bytes, however it was spelt on its way there."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

import zstandard

_FRAME = b"\x28\xb5\x2f\xfd"  # how a zstd frame begins
_MAX_FRAME_BYTES = 64 << 20


def traces(secrets: Mapping[str, str], places: Mapping[str, bytes]) -> list[str]:
    """ "<secret> as <spelling> in <place>" of each find; never the secret itself."""
    found = []
    for place, body in places.items():
        for layer in _layers(body):
            for name, secret in secrets.items():
                found += [
                    f"{name} as {spelling} in {place}"
                    for spelling, written in _spellings(secret)
                    if written in layer
                ]
    return found


def _spellings(secret: str) -> Iterator[tuple[str, bytes]]:
    raw = secret.encode()
    yield "itself", raw
    yield "hex", raw.hex().encode()
    yield "a part of a URL", quote(secret, safe="").encode()
    for shift in range(3):  # base64 of a text that the secret is a part of, at each place in it
        encoded = base64.b64encode(b"\0" * shift + raw)
        inside = encoded[4 if shift else 0 : -4]
        yield "base64", inside
        yield "base64 for URLs", inside.replace(b"+", b"-").replace(b"/", b"_")


def _layers(body: bytes) -> Iterable[bytes]:
    """The bytes, and what each zstd frame in them unpacks to."""
    yield body
    for match in re.finditer(re.escape(_FRAME), body):
        try:
            with zstandard.ZstdDecompressor().stream_reader(
                io.BytesIO(body[match.start() :])
            ) as reader:
                yield reader.read(_MAX_FRAME_BYTES)
        except zstandard.ZstdError:
            continue  # four bytes that only look like a frame's beginning
