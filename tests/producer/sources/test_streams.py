from __future__ import annotations

import bz2
import gzip
import io
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from dflash_workers.contract.errors import BadInput
from tests.producer.sources.reading import read, rows

ROOT = Path(__file__).parents[3]

Compress = Callable[[bytes], bytes]

READ_STDIN = """
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import read_items
try:
    print(list(read_items([{name!r}], Settings())))
except BadInput as error:
    print("BadInput", error)
"""


def compress_zstd(body: bytes) -> bytes:
    # Frames as appending tools write them: the first without its size, one skippable, one empty.
    half = len(body) // 2
    first = zstandard.ZstdCompressor(write_content_size=False).compress(body[:half])
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"
    return skippable + first + zstandard.compress(b"") + zstandard.compress(body[half:])


def compress_gzip(body: bytes) -> bytes:
    half = len(body) // 2
    return gzip.compress(body[:half]) + gzip.compress(b"") + gzip.compress(body[half:])


def compress_bzip2(body: bytes) -> bytes:
    half = len(body) // 2
    return bz2.compress(body[:half]) + bz2.compress(body[half:])


every_compression = pytest.mark.parametrize(
    "compress", [compress_zstd, compress_gzip, compress_bzip2]
)


@every_compression
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r"])
def test_compressed_files_are_read_whatever_their_name(
    tmp_path: Path, compress: Compress, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(
        compress(b"".join(b'{"n":%d,"t":"%s"}\n' % (n, b"x" * (n % 999)) for n in range(5000)))
    )

    found = rows(path)

    assert [row["n"] for row in found if isinstance(row, dict)] == list(range(5000))


@every_compression
def test_a_compressed_file_that_is_cut_short_is_an_error_after_its_rows(
    tmp_path: Path, compress: Compress
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(compress(b'{"a":1}\n' * 1000)[:-3])

    with pytest.raises(BadInput, match=r"r\.jsonl: damaged or cut short"):
        read(path)


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh9"])
def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, magic: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(magic + b"\xff" * 100)

    with pytest.raises(BadInput, match="damaged"):
        read(path)


@pytest.mark.parametrize("compress", [zstandard.compress, gzip.compress, bz2.compress])
def test_a_small_file_that_expands_without_end_costs_no_memory(
    tmp_path: Path, compress: Compress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.sources.lines.MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "r.jsonl"
    path.write_bytes(compress(b" " * (1 << 26)))

    tracemalloc.start()
    with pytest.raises(BadInput, match="a line of over 1 MiB"):
        read(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 1 << 24


def test_a_dash_is_stdin_and_stdin_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(gzip.compress(b'{"a":1}\n')))
    monkeypatch.setattr(sys, "stdin", stdin)

    found = read("-")

    assert found == [("stdin:1", {"a": 1})]
    assert not stdin.buffer.closed


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "r.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"a":1}\n' * 100_000,))
    writer.start()

    found = read(pipe)

    writer.join()
    assert len(found) == 100_000
    assert found[-1] == (f"{pipe}:100000", {"a": 1})


def test_stdin_can_be_named_by_its_path() -> None:
    code = READ_STDIN.format(name="/dev/stdin")

    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b'{"a":1}\n',
        capture_output=True,
        check=True,
        cwd=ROOT,
    )

    assert done.stdout == b"[('/dev/stdin:1', b'{\"a\":1}')]\n"


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_closed_stdin_is_an_error_in_one_line(name: str) -> None:
    code = READ_STDIN.format(name=name)

    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code],
        capture_output=True,
        cwd=ROOT,
    )

    assert done.stderr == b""
    assert done.stdout.startswith(b"BadInput ")
    assert done.stdout.count(b"\n") == 1
