"""What people name -> the files to read: a file, a folder, a pattern, a saved data set.

Asks <- places.py; hands places to -> inputs.py. Of a folder (with all below it) and of a pattern
the files of known kinds are read, by name; what begins with "." or "_" is left alone, as is the
metadata that data sets carry. A folder that `datasets.save_to_disk` wrote says itself which of its
files are data: the others are that library's caches. What names nothing is BadInput.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from os.path import islink, splitext

import orjson
from pyarrow.fs import FileType, LocalFileSystem

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings
from producer.sources.places import S3_SCHEME, Place, check_name, find_place, list_folder, type_of
from producer.sources.streams import opened_stream

LINES = (".jsonl", ".ndjson")
JSON = (".json",)
CELLS = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
KNOWN_ENDINGS = (*LINES, *JSON, *CELLS, *PARQUET, *ARROW)
COMPRESSIONS = (".gz", ".zst", ".bz2")

_METADATA = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_WILDCARDS = re.compile(r"[*?[]")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def ending_of(name: str) -> str:
    """The ending that tells a file's kind: ".jsonl" of "a.JSONL.gz"."""
    stem, ending = splitext(name.lower())
    return splitext(stem)[1] if ending in COMPRESSIONS else ending


def find_files(name: str, settings: Settings) -> list[Place]:
    """The files that a path, an s3:// URL or a pattern of either stands for. Never empty."""
    place = find_place(name, settings)
    kind = type_of(place)
    if kind is FileType.Directory:
        files = sorted(_walk(place), key=lambda file: file.name)
        if not files:
            raise BadInput(f"{name}: holds no file of a known kind: {', '.join(KNOWN_ENDINGS)}")
    elif kind is not FileType.NotFound:
        files = [place]  # named outright: whatever its ending, or a pipe
    elif _WILDCARDS.search(name):
        files = _files_matching(place)
        if not files:
            raise BadInput(f"{name}: matches no file")
    else:
        raise BadInput(f"{name}: no such file{_advice(name)}")
    for file in files:
        check_name(file.name)
    return files


def _advice(name: str) -> str:
    if name.startswith(S3_SCHEME):
        return f" or folder: for every key that begins so, write '{name}*'"
    if _HUB_NAME.fullmatch(name) and ending_of(name) not in KNOWN_ENDINGS:
        return f": a data set of the Hugging Face hub is written hf:{name}"
    return ""


def _walk(folder: Place) -> Iterator[Place]:
    entries = list_folder(folder)
    names = {_base(entry) for entry, _ in entries}
    if {"state.json", "dataset_info.json"} <= names:
        yield from _saved_files(folder)
        return
    for entry, kind in entries:
        if _is_visible(entry):
            if kind is FileType.Directory and not _is_link(entry):
                yield from _walk(entry)
            elif kind is FileType.File and _is_known(entry):
                yield entry


def _saved_files(folder: Place) -> list[Place]:
    state = folder.child("state.json")
    with opened_stream(state) as stream:
        try:
            files = orjson.loads(stream.read())["_data_files"]
            return [folder.child(file["filename"]) for file in files]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BadInput(f"{state.name}: not what `save_to_disk` writes: {error!r}") from error


def _files_matching(pattern: Place) -> list[Place]:
    """By name, each once. Where no match is of a known kind, all are taken as JSON Lines."""
    if pattern.name.startswith(S3_SCHEME):
        bucket, *segments = pattern.path.split("/")
        root = Place(pattern.system, S3_SCHEME + bucket)
    else:
        segments = pattern.path.split("/")
        root = Place(pattern.system, "/" if pattern.path.startswith("/") else "")
    found: list[Place] = []
    for entry, kind in _matches(root, [segment for segment in segments if segment]):
        found += _walk(entry) if kind is FileType.Directory else [entry]
    files = sorted({f.name: f for f in found}.values(), key=lambda file: file.name)
    return [file for file in files if _is_known(file)] or files


def _matches(folder: Place, segments: list[str]) -> Iterator[tuple[Place, FileType]]:
    first, *rest = segments
    if first == "**":
        yield from _matches(folder, rest or ["*"])
        for entry, kind in list_folder(folder):
            if kind is FileType.Directory and _is_visible(entry) and not _is_link(entry):
                yield from _matches(entry, segments)
        return
    if _WILDCARDS.search(first):
        entries = [(e, k) for e, k in list_folder(folder) if _fits(_base(e), first)]
    else:
        entry = folder.child(first)
        entries = [(entry, type_of(entry))]
    for entry, kind in entries:
        if not rest and kind is not FileType.NotFound:
            yield entry, kind
        elif rest and kind is FileType.Directory:
            yield from _matches(entry, rest)


def _fits(base: str, pattern: str) -> bool:
    """As a shell matches; a wildcard stands for no leading "." or "_"."""
    return fnmatchcase(base, pattern) and (base[0] not in "._" or base[0] == pattern[0])


def _is_visible(entry: Place) -> bool:
    return _base(entry)[0] not in "._"


def _is_known(entry: Place) -> bool:
    return ending_of(entry.name) in KNOWN_ENDINGS and _base(entry) not in _METADATA


def _is_link(entry: Place) -> bool:
    """A link to a folder isn't followed: it may lead back to where the walk came from."""
    return isinstance(entry.system, LocalFileSystem) and islink(entry.path)


def _base(entry: Place) -> str:
    return entry.name.rpartition("/")[2]
