"""Where a model comes from: a folder, s3://BUCKET/KEY or hf:ORG/NAME[@REVISION] -> files.

Opened by -> staged, which chooses where the files go and looks after them. A Source says what it
has before a byte is moved; `fetch_into` may be broken off at any byte and begun anew. The S3 is the
settings' own, whichever bucket is named, read in ranges by several threads at once. Folders inside
the model's folder are left out: their weights are another format's (original/, onnx/).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from dflash_workers.contract.errors import (
    BadInput,
    FleetError,
    Missing,
    NotEnough,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store

S3_SCHEME, HUB_SCHEME = "s3://", "hf:"
NUM_READERS = 8
RANGE_BYTES = 16 << 20
HUB_TIMEOUT_S = 10.0
_HUB_IGNORED = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*/*", ".*"]

OnBytes = Callable[[int], None]  # told how many more have come; may raise to break off


class Source(Protocol):
    """A model somewhere."""

    name: str  # of the model, for a folder's name

    def identity(self) -> str:
        """Another text where other files are there. Raises Missing where there are none."""

    def num_bytes(self) -> int:
        """Of all files together."""

    def fetch_into(self, folder: Path, on_bytes: OnBytes) -> None:
        """Every file into the folder, which is there and empty."""


def open_source(model: str, settings: Settings) -> Source:
    """Raises BadInput for what can be no model's place, Missing for a folder that isn't there."""
    if model.startswith(S3_SCHEME):
        return S3Source(model, settings)
    if model.startswith(HUB_SCHEME):
        return HubSource(model)
    folder = Path(model)
    if not model or not folder.is_dir():
        raise Missing(
            f"no model at {model or '(none given)'}: pass --model FOLDER, s3://BUCKET/KEY or "
            "hf:ORG/NAME"
        )
    return FolderSource(folder)


class FolderSource:
    """A folder of this machine, or of a network's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._files = sorted(
            path for path in self.folder.iterdir() if path.is_file() and path.name[0] != "."
        )
        if not self._files:
            raise Missing(f"{folder}: the model's folder is empty")

    def identity(self) -> str:
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._files]
        return f"{self.folder} {facts}"

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def fetch_into(self, folder: Path, on_bytes: OnBytes) -> None:
        with _translated(f"{self.folder}"), ThreadPoolExecutor(NUM_READERS) as pool:
            for _ in pool.map(lambda path: _copy(path, folder / path.name, on_bytes), self._files):
                pass


class S3Source:
    """A "folder" of S3."""

    def __init__(self, url: str, settings: Settings) -> None:
        bucket, _, prefix = url.removeprefix(S3_SCHEME).rstrip("/").partition("/")
        if not bucket or not prefix:
            raise BadInput(f"{url}: write s3://BUCKET/FOLDER")
        whole = open_store(settings)
        self._store = Store(whole.client, bucket, prefix, whole.endpoint)
        self._url = url
        self.name = prefix.rpartition("/")[2]
        self._files = [
            (key.lstrip("/"), size)
            for key, size in self._store.list("")
            if "/" not in key.lstrip("/") and not key.lstrip("/").startswith(".")
        ]
        if not self._files:
            raise Missing(f"{url}: no model there")

    def identity(self) -> str:
        return f"{self._url} {self._files}"

    def num_bytes(self) -> int:
        return sum(size for _, size in self._files)

    def fetch_into(self, folder: Path, on_bytes: OnBytes) -> None:
        for name, size in self._files:
            with (folder / name).open("wb") as file:
                file.truncate(size)
        with _translated(self._url), ThreadPoolExecutor(NUM_READERS) as pool:
            fetched = [pool.submit(self._fetch_range, folder, part) for part in self._ranges()]
            for future in as_completed(fetched):
                on_bytes(future.result())

    def _ranges(self) -> Iterator[_Range]:
        for name, size in self._files:
            for offset in range(0, size, RANGE_BYTES):
                yield _Range(name, offset, min(RANGE_BYTES, size - offset))

    def _fetch_range(self, folder: Path, wanted: _Range) -> int:
        body = self._store.get_range(wanted.name, wanted.offset, wanted.num_bytes)
        if len(body) != wanted.num_bytes:
            raise StoreUnavailable(
                f"{self._url}/{wanted.name}: {len(body)} bytes came, not {wanted.num_bytes}"
            )
        with (folder / wanted.name).open("r+b") as file:
            os.pwrite(file.fileno(), body, wanted.offset)
        return len(body)


class _Range(NamedTuple):
    """A part of one of S3's files."""

    name: str
    offset: int
    num_bytes: int


class HubSource:
    """A model of the Hugging Face hub, loaded by the hub's own library.

    Once staged it is known by its name alone, so that a node starts without the hub: name a
    revision to get another.
    """

    def __init__(self, name: str) -> None:
        found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
        if not found:
            raise BadInput(f"{name}: write hf:ORG/NAME or hf:ORG/NAME@REVISION")
        self._repo, self._revision = found[1], found[2]
        self._url = name
        self.name = self._repo.rpartition("/")[2]

    def identity(self) -> str:
        return self._url

    def num_bytes(self) -> int:
        # Heavy, and needed by nobody else here.
        from fnmatch import fnmatch

        from huggingface_hub import HfApi

        with _translated(self._url, hub=True):
            info = HfApi().model_info(
                self._repo, revision=self._revision, files_metadata=True, timeout=HUB_TIMEOUT_S
            )
        files = [
            s for s in info.siblings or [] if not any(fnmatch(s.rfilename, p) for p in _HUB_IGNORED)
        ]
        return sum(file.size or 0 for file in files)

    def fetch_into(self, folder: Path, on_bytes: OnBytes) -> None:
        from huggingface_hub import snapshot_download

        with _translated(self._url, hub=True):
            snapshot_download(
                self._repo,
                revision=self._revision,
                local_dir=folder,
                ignore_patterns=_HUB_IGNORED,
                etag_timeout=HUB_TIMEOUT_S,
            )
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        on_bytes(sum(path.stat().st_size for path in folder.iterdir()))


def _copy(source: Path, target: Path, on_bytes: OnBytes) -> None:
    """And read it again: a copy that isn't the original is found here and not by a model that talks
    nonsense."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while part := reader.read(RANGE_BYTES):
            digest.update(part)
            writer.write(part)
            on_bytes(len(part))
    with target.open("rb") as copied:
        if hashlib.file_digest(copied, "sha256").digest() != digest.digest():
            raise NotEnough(f"{target}: the copy differs from {source}: is its memory or disk ill?")


@contextmanager
def _translated(where: str, *, hub: bool = False) -> Iterator[None]:
    """Errors of file systems and of the hub's library as ours."""
    fates: list[tuple[tuple[type[Exception], ...], type[FleetError], str]] = []
    if hub:
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

        private = ": check the name; a private or gated model wants HF_TOKEN or `hf auth login`"
        fates = [
            ((RepositoryNotFoundError,), Missing, private),
            ((HfHubHTTPError, HTTPError, ConnectionError, TimeoutError), StoreUnavailable, ""),
            ((ValueError,), BadInput, ""),
        ]
    fates.append(((OSError,), NotEnough, ""))
    try:
        yield
    except tuple(kind for kinds, _, _ in fates for kind in kinds) as error:
        fate, advice = next((f, a) for kinds, f, a in fates if isinstance(error, kinds))
        said = str(error).split("\n")[0] or type(error).__name__
        raise fate(f"{where}: could not be fetched: {said}{advice}") from error
