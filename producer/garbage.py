"""Objects of a run that no reader will ever follow, and their removal.

Reads the plan's log, listings and commits in S3, and from Redis who works. Garbage is: data of a
batch whose commit names another; of a cancelled run, data of a batch without a commit, once nobody
works on it; prompts and refusals whose number in the log was taken by a segment that names others.
Everything else stays: data of an uncommitted batch may still get its commit, and objects with a
number that is not taken yet may belong to a segment that is being written now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from dflash_workers.contract.commit import committed_batches, read_commit
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.store import Store

NUM_WORKERS = 16
_DATA = re.compile(r"/data/(\d+)/([^/]+)/[^/]+$")
_PLANNED = re.compile(r"/(\d+)\.[^/.]+(?:\.refused)?\.jsonl\.zst$")  # prompts or refusals


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that may go."""

    key: str
    num_bytes: int
    kind: str  # lost_data | cancelled_data | unlisted_plan


def find_garbage(store: Store, hints: Hints, run: str) -> list[Garbage]:
    """Everything that may go. Raises Conflict for a cancelled run that is still worked on."""
    return [*_data(store, hints, run), *_plan(store, run)]


def remove(store: Store, garbage: list[Garbage]) -> None:
    """Delete the objects. Safe to repeat."""
    with ThreadPoolExecutor(NUM_WORKERS) as workers:
        list(workers.map(store.delete, [item.key for item in garbage]))


def _check_idle(hints: Hints, run: str) -> None:
    with translated_redis(hints.where):
        num_inflight = int(hints.redis.zcard(hints.keys.inflight(run)))
    if num_inflight:
        raise Conflict(
            f"run {run!r} is cancelled, but {num_inflight} batches are still in workers' hands: "
            "they give them up within seconds, or their leases lapse: try again then"
        )


def _data(store: Store, hints: Hints, run: str) -> Iterator[Garbage]:
    # In this order: whoever wrote a listed object is still in flight, or has given up, or its
    # commit is listed too. What comes later is not touched.
    listed = list(store.list(RunKeys(run).all_data))
    cancelled = Control(store, run).state() is RunState.CANCELLED
    if cancelled:
        _check_idle(hints, run)
    committed = set(committed_batches(store, run))
    groups = [(at, list(group)) for at, group in groupby(listed, key=lambda item: _batch(item[0]))]
    if cancelled:
        for at, group in groups:
            if at and at not in committed:
                yield from (Garbage(*item, kind="cancelled_data") for item in group)
    # The only object of a committed batch is the one that its commit names.
    doubtful = [(at, group) for at, group in groups if at in committed and len(group) > 1]
    with ThreadPoolExecutor(NUM_WORKERS) as readers:
        commits = readers.map(lambda at: read_commit(store, run, *at), [at for at, _ in doubtful])
        for (_, group), commit in zip(doubtful, commits, strict=True):
            for key, num_bytes in group:
                if key != commit.data_key:
                    yield Garbage(key, num_bytes, kind="lost_data")


def _batch(key: str) -> tuple[int, str] | None:
    match = _DATA.search(key)
    return (int(match[1]), match[2]) if match else None


def _plan(store: Store, run: str) -> Iterator[Garbage]:
    keys = RunKeys(run)
    listed = [*store.list(keys.all_prompts), *store.list(keys.plan_log)]
    named: set[str] = set()
    num_segments = 0
    for segment in read_segments(store, run):
        named |= {segment.prompts, segment.refusals}
        num_segments = segment.number + 1
    for key, num_bytes in listed:
        match = _PLANNED.search(key)
        if match and int(match[1]) < num_segments and key not in named:
            yield Garbage(key, num_bytes, kind="unlisted_plan")
