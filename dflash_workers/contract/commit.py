"""A batch's end: one data object per attempt, one commit object per batch, both written once.

Written by workers (generate.py), read by everybody who follows. Readers start from commits and
never list data/: an attempt that lost the race leaves a data object that no commit names. A batch
is done exactly when `commits/<segment>/<batch>.json` exists.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from dflash_workers.contract.errors import Conflict, Corrupt
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress, decompress, dump, dump_lines, load, load_lines
from dflash_workers.contract.records import Commit, Row
from dflash_workers.contract.store import Store


def seal_rows(rows: list[Row]) -> tuple[bytes, str]:
    """The data object of an attempt, and its sha256. Built once: a retry sends the same bytes."""
    body = compress(dump_lines(rows))
    return body, hashlib.sha256(body).hexdigest()


def publish(store: Store, commit: Commit, body: bytes) -> Commit:
    """Write data, then the commit; return the commit that stands, ours or the winner's.

    Safe to repeat with the same arguments after any Transient error. A losing attempt's data
    object is removed only here, after the winner's commit has been read.
    """
    store.put_new(commit.data_key, body)
    key = RunKeys(commit.run).commit(commit.segment, commit.batch)
    try:
        store.put_new(key, dump(commit))
        return commit
    except Conflict:
        winner = load(Commit, store.get(key))
        if winner.data_key != commit.data_key:
            store.delete(commit.data_key)
        return winner


def committed_batches(store: Store, run: str, after: str = "") -> Iterator[tuple[int, str]]:
    """(segment, batch) of every commit, in key order; `after` is a commit's key."""
    for key, _size in store.list(RunKeys(run).commits, after=after):
        match = re.search(r"/(\d+)/([^/]+)\.json$", key)
        if match:
            yield int(match[1]), match[2]


def read_commit(store: Store, run: str, segment: int, batch: str) -> Commit:
    """The commit of a batch. Raises Missing, Corrupt."""
    return load(Commit, store.get(RunKeys(run).commit(segment, batch)))


def read_rows(store: Store, commit: Commit) -> list[Row]:
    """The rows that a commit names, checked against its sha256 and count. Raises Corrupt."""
    body = store.get(commit.data_key)
    if hashlib.sha256(body).hexdigest() != commit.sha256:
        raise Corrupt(f"{commit.data_key}: sha256 differs from its commit's")
    rows = load_lines(Row, decompress(body))
    if len(rows) != commit.num_rows:
        raise Corrupt(f"{commit.data_key}: {len(rows)} rows, its commit says {commit.num_rows}")
    return rows
