"""Where input files lie, on this machine or in S3, and what lies there.

Asked by <- files.py, opened by streams.py. Both are Arrow's file systems, because Parquet and Arrow
files want one whose files can be read in any order; S3 is reached with the keys, endpoint and
region of the settings. Every error of the file systems, of the decompressors and of Arrow's readers
becomes one of ours here, by table.
"""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileSelector,
    FileSystem,
    FileType,
    LocalFileSystem,
    S3FileSystem,
)

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    FleetError,
    Missing,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings

S3_SCHEME = "s3://"

# The fate of each code in "AWS Error CODE during ...": Arrow has no classes for them.
_FATE_BY_AWS_ERROR: dict[str, type[FleetError]] = {
    "ACCESS_DENIED": AccessDenied,
    "INVALID_ACCESS_KEY_ID": AccessDenied,
    "INVALID_CLIENT_TOKEN_ID": AccessDenied,
    "SIGNATURE_DOES_NOT_MATCH": AccessDenied,
    "INVALID_SIGNATURE": AccessDenied,
    "EXPIRED_TOKEN": AccessDenied,
    "MISSING_AUTHENTICATION_TOKEN": AccessDenied,
    "NO_SUCH_BUCKET": Missing,
    "NO_SUCH_KEY": Missing,
    "RESOURCE_NOT_FOUND": Missing,
    "NETWORK_CONNECTION": StoreUnavailable,
    "SLOW_DOWN": StoreUnavailable,
    "THROTTLING": StoreUnavailable,
    "SERVICE_UNAVAILABLE": StoreUnavailable,
    "INTERNAL_FAILURE": StoreUnavailable,
    "REQUEST_TIMEOUT": StoreUnavailable,
    "UNKNOWN": StoreUnavailable,
}
_ADVICE: dict[type[FleetError], str] = {
    AccessDenied: ": check DFLASH_S3_ACCESS_KEY and DFLASH_S3_SECRET_KEY",
    StoreUnavailable: ": is it running, and is DFLASH_S3_ENDPOINT right?",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A file or a folder, which may not exist."""

    system: FileSystem
    name: str  # as people write it: a path or s3://bucket/key

    @property
    def path(self) -> str:
        """The name as its file system wants it."""
        return self.name.removeprefix(S3_SCHEME) or "."

    def child(self, name: str) -> Place:
        """The entry `name` of this folder."""
        folder = f"{self.name.rstrip('/')}/" if self.name else ""
        return Place(self.system, folder + name)


def find_place(name: str, settings: Settings) -> Place:
    """The place of that name. Raises BadInput where no such place can be."""
    check_name(name)
    if "\0" in name or not name:
        raise BadInput(f"{name!r}: no such file")
    if not name.startswith(S3_SCHEME):
        return Place(LocalFileSystem(), name)
    if not name.removeprefix(S3_SCHEME).partition("/")[0]:
        raise BadInput(f"{name}: names no bucket: write s3://BUCKET/KEY")
    return Place(_open_s3(settings), name)


def check_name(name: str) -> None:
    """Raise BadInput for a name that can't be written down, and so not into a plan."""
    shown = name.encode(errors="replace").decode()
    if shown != name:
        raise BadInput(f"{shown}: the file's name is not UTF-8: rename it")


def type_of(place: Place) -> FileType:
    """What lies there; FileType.NotFound where nothing does."""
    with translated_errors(place.name):
        return place.system.get_file_info(place.path).type


def list_folder(folder: Place) -> list[tuple[Place, FileType]]:
    """What lies in a folder, by name."""
    with translated_errors(folder.name):
        if isinstance(folder.system, LocalFileSystem):
            found = _list_local(folder.path)
        else:
            infos = folder.system.get_file_info(FileSelector(folder.path))
            found = [(info.base_name, info.type) for info in infos]
    return [(folder.child(name), kind) for name, kind in sorted(found)]


def _list_local(path: str) -> list[tuple[str, FileType]]:
    """Of this machine: Arrow would stop at a name that is not UTF-8, whether it matters or not."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            kind = FileType.Unknown if os.path.exists(entry.path) else FileType.NotFound
            if entry.is_dir():
                kind = FileType.Directory
            elif entry.is_file():
                kind = FileType.File
            found.append((entry.name, kind))
    return found


@contextmanager
def translated_errors(name: str) -> Iterator[None]:
    """Errors of file systems, decompressors and Arrow's readers as ours."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise BadInput(f"{name}: damaged or cut short: {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise _fate_of(error, name) from error


def _fate_of(error: Exception, name: str) -> FleetError:
    text = str(error).split("\n")[0].rstrip(". ")
    aws = re.search(r"AWS Error ([A-Z_]+) during", text)
    if aws:
        fate = _FATE_BY_AWS_ERROR.get(aws[1], BadInput)
        return fate(f"{name}: can't be read from S3: {aws[1]}{_ADVICE.get(fate, '')}")
    if isinstance(error, FileNotFoundError):
        return BadInput(f"{name}: no such file")
    if isinstance(error, OSError) and error.errno:
        return BadInput(f"{name}: can't be read: {error.strerror}")
    return BadInput(f"{name}: damaged or cut short: {text}")


@functools.lru_cache(maxsize=1)
def _open_s3(settings: Settings) -> S3FileSystem:
    endpoint = urlsplit(settings.s3_endpoint)
    try:
        return S3FileSystem(
            access_key=settings.s3_access_key or None,
            secret_key=settings.s3_secret_key or None,
            region=settings.s3_region,
            endpoint_override=endpoint.netloc or None,
            scheme="http" if endpoint.scheme == "http" else "https",
            connect_timeout=5,
            request_timeout=60,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=4),
        )
    except ValueError as error:  # one key of two
        raise BadInput(f"S3 can't be used with these keys and settings: {error}") from error
