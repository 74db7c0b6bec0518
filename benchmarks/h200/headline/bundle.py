"""A run as one file: plan, commits and token shards, without the rows' text.

Written by generate.py, put back by it where its S3 lost them, read by training.py without any S3.
Some 0.3 KB a completion, because shards are ids and many prompts come several times. Invariant: a
bundle is whole or absent; putting one back overwrites nothing.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zstandard

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.store import Store
from trainer.tokens.shards import Sample, read_shard

LEVEL = 17
AT_ONCE = 16  # objects under way to or from S3


def save_bundle(store: Store, run: str, path: Path) -> int:
    """Write a run's objects to `path`; how many there were."""
    keys = RunKeys(run)
    prefixes = (keys.plan_log, keys.all_prompts, keys.commits, keys.tokens)
    names = [keys.spec, *(key for prefix in prefixes for key, _size in store.list(prefix))]
    draft = path.with_suffix(".new")
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=-1)
    with (
        ThreadPoolExecutor(AT_ONCE) as readers,
        draft.open("wb") as file,
        compressor.stream_writer(file) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for name, body in zip(names, readers.map(store.get, names), strict=True):
            facts = tarfile.TarInfo(name)
            facts.size = len(body)
            archive.addfile(facts, io.BytesIO(body))
    draft.rename(path)
    return len(names)


def read_bundle(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each object's key and body."""
    with (
        path.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for facts in archive:
            body = archive.extractfile(facts)
            assert body is not None, "a bundle holds files alone"
            yield facts.name, body.read()


def restore_bundle(store: Store, path: Path) -> int:
    """Put back what S3 lacks; how many objects the bundle has."""

    def put(item: tuple[str, bytes]) -> None:
        key, body = item
        if not store.exists(key):
            store.put_new(key, body)

    with ThreadPoolExecutor(AT_ONCE) as writers:
        return sum(1 for _ in writers.map(put, read_bundle(path)))


def read_run(path: Path, run: str) -> tuple[RunSpec, list[Sample]]:
    """What the run was made with, and its samples in an order that says nothing of them."""
    keys = RunKeys(run)
    spec, samples = None, []
    for key, body in read_bundle(path):
        if key == keys.spec:
            spec = load(RunSpec, body)
        elif key.endswith(".arrow"):
            samples += read_shard(body)
    assert spec is not None, "a bundle holds its run's run.json"
    return spec, sorted(samples, key=lambda sample: (sample.prompt_key, sample.turn))
