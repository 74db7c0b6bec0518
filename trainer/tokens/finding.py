"""A prompt's samples, by its id or its key, without looking through all shards.

Called by the `show` verb. The plan's log lists the keys of every batch, and a key follows from an
id, so that one shard is read: the small one of the prompt's batch, which stays when shards are
compacted. Where that has no sample of the prompt, the objects beside it say why.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import orjson

from dflash_workers.contract.commit import read_commit
from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import Segment
from dflash_workers.contract.store import Store
from trainer.tokens.shards import Sample, read_quarantined, read_shard

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Place:
    segment: int
    batch: str


def find_samples(store: Store, run: str, prompt_id: str) -> list[Sample]:
    """The samples of a prompt, by its id or its key, in the order of turns.

    Raises Missing where it has none, with the reason as far as the objects of the run tell it.
    """
    keys = keys_of(prompt_id)
    places = list(_places(store, run, keys))
    if not places:
        raise Missing(
            f"no prompt of run {run!r} has the id or the key {prompt_id!r}: it may have been "
            "refused when it was enqueued"
        )
    for place in reversed(places):  # a rejected prompt may have been planned again
        found = [s for s in _shard_samples(store, run, place) if s.prompt_key in keys]
        if found:
            return sorted(found, key=lambda s: s.turn)
    raise Missing(f"prompt {prompt_id!r} has no samples: {_why(store, run, places[-1], keys)}")


def keys_of(prompt_id: str) -> list[str]:
    """The keys that a prompt of this id, or of this key, has in the plan."""
    own = hashlib.sha256(prompt_id.encode()).hexdigest()[:32]
    keys = [prompt_id, own] if _KEY.fullmatch(prompt_id) else [own]
    name, mark, sample = prompt_id.rpartition("#")
    if mark:  # a row's second sample, or a later one
        first = hashlib.sha256(name.encode()).hexdigest()[:32]
        keys.append(hashlib.sha256(f"{first} sample {sample}".encode()).hexdigest()[:32])
    return keys


def _places(store: Store, run: str, keys: list[str]) -> Iterator[_Place]:
    for number in count():
        try:
            body = store.get(RunKeys(run).segment(number))
        except Missing:
            return
        if any(key.encode() in body for key in keys):  # most segments need no parsing
            for batch in load(Segment, body).batches:
                if not set(keys).isdisjoint(batch.prompt_keys):
                    yield _Place(number, batch.batch)


def _shard_samples(store: Store, run: str, place: _Place) -> list[Sample]:
    try:
        return read_shard(store.get(RunKeys(run).shard(place.segment, place.batch)))
    except Missing:
        return []


def _why(store: Store, run: str, place: _Place, keys: list[str]) -> str:
    """Why the place's shard has no sample of the prompt."""
    objects, where = RunKeys(run), f"batch {place.segment:06d}/{place.batch}"
    try:
        commit = read_commit(store, run, place.segment, place.batch)
    except Missing:
        return f"{where} is not committed yet"
    for rejection in commit.rejected:
        if rejection.key in keys:
            return f"it was rejected: {rejection.reason}: {rejection.detail}"
    try:
        shard = store.get(objects.shard(place.segment, place.batch))
    except Missing:
        return _why_no_shard(store, objects.quarantine(place.segment, place.batch), where)
    for left_out in read_quarantined(shard):
        if not set(keys).isdisjoint(keys_of(left_out["id"])):
            return f"`tokenize` can't say what to learn: {left_out['reason']}: {left_out['detail']}"
    return "`tokenize` left its answers out, as empty, looping or garbled"


def _why_no_shard(store: Store, quarantine: str, where: str) -> str:
    try:
        return f"{where} is quarantined: {orjson.loads(store.get(quarantine))['error']}"
    except Missing:
        return f"{where} is not tokenized yet"
