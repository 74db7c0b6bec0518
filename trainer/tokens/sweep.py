"""Committed batches that nobody has tokenized: what makes a lost hint harmless.

Used by stage.py; reads S3 alone. A batch is done with once its shard exists, or the note that says
why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_workers.contract.commit import committed_batches
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.store import Store

_DONE = re.compile(r"/(?:quarantine/)?(\d{6,})/([^/]+)\.(?:arrow|json)$")


def untokenized(store: Store, run: str, *, has_model: bool) -> Iterator[BatchMessage]:
    """The batches to make a shard of. Without a model those that want a tokenizer are left out."""
    keys = RunKeys(run)
    done = {match.groups() for key, _ in store.list(keys.tokens) if (match := _DONE.search(key))}
    left_out = set() if has_model else _imported(store, run)
    for segment, batch in committed_batches(store, run):
        if (f"{segment:06d}", batch) not in done and segment not in left_out:
            yield BatchMessage(run, segment, batch)


def _imported(store: Store, run: str) -> set[int]:
    return {segment.number for segment in read_segments(store, run) if segment.road == "text"}
