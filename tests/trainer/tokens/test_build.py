"""A commit -> its shard: where it comes from is said, and what is corrupt is never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.flags import (
    EMPTY,
    GARBLED,
    REPETITION,
    TOOL_CALL_LOOP,
    TRUNCATED,
)
from dflash_workers.contract.store import Store
from tests.trainer.tokens.committed import (
    KEYS,
    SPEC,
    STOP,
    THREE_TURNS,
    commit_rows,
    make_answer,
    make_row,
)
from trainer.tokens.build import Builder, Outcome
from trainer.tokens.shards import Source, read_provenance, read_shard, write_shard


def test_answers_that_do_not_train_are_counted_by_reason(run_store: Store) -> None:
    flagged = make_answer([10], [20, STOP], flags=(EMPTY,))
    nothing = make_answer([10], [])
    only_stop = make_answer([10], [STOP])
    loop = make_answer([10], [20] * 40, flags=(TRUNCATED, REPETITION))
    calls = make_answer([10], [21] * 40, flags=(TOOL_CALL_LOOP,))
    noise = make_answer([10], [22, 23], flags=(GARBLED,))
    good = make_answer([10], [20, STOP])
    answers = (flagged, nothing, only_stop, loop, calls, noise, good)
    commit = commit_rows(run_store, "b", [make_row(*answers)])

    shard = Builder(run_store, SPEC).shard_of(commit)

    assert read_provenance(shard)["skipped"] == {
        EMPTY: 3,
        REPETITION: 1,
        TOOL_CALL_LOOP: 1,
        GARBLED: 1,
    }
    assert len(read_shard(shard)) == 1


def test_a_shard_names_its_origin(run_store: Store) -> None:
    commit = commit_rows(run_store, "b", [THREE_TURNS])

    provenance = read_provenance(Builder(run_store, SPEC).shard_of(commit))

    assert provenance["road"] == "ids"
    assert run_store.exists(provenance["commit_key"])
    assert provenance["data_sha256"] == commit.sha256
    assert provenance["target_fingerprint"] == SPEC.target.fingerprint()
    assert (provenance["tokenizer_sha256"], provenance["template_sha256"]) == ("k" * 64, "m" * 64)


@pytest.mark.parametrize("token_id", [1000, -1, 2**31, 2**63 - 1])
def test_an_id_that_is_no_token_is_corrupt(run_store: Store, token_id: int) -> None:
    row = make_row(make_answer([10, token_id], [20, STOP]))

    with pytest.raises(Corrupt):
        Builder(run_store, SPEC).shard_of(commit_rows(run_store, "b", [row]))


@dataclass(frozen=True)
class RacingStore(Store):
    """Another tokenizer is done with the batch while we still read its data."""

    key: str
    body: bytes

    def get(self, key: str) -> bytes:
        if "/data/" in key:
            Store.put_new(self, self.key, self.body)
        return Store.get(self, key)


def race(store: Store, theirs: bytes) -> Outcome:
    parts = store.client, store.bucket, store.prefix, store.endpoint
    racing = RacingStore(*parts, KEYS.shard(1, "b"), theirs)
    return Builder(racing, SPEC).make(1, "b")


def source_of(shard: bytes) -> Source:
    provenance = read_provenance(shard)
    return cast(Source, {name: provenance[name] for name in Source.__annotations__})  # type: ignore[literal-required]


def test_whoever_is_second_accepts_the_same_content_packed_otherwise(run_store: Store) -> None:
    commit = commit_rows(run_store, "b", [THREE_TURNS])
    ours = Builder(run_store, SPEC).shard_of(commit)
    theirs = write_shard(read_shard(ours), {**source_of(ours), "tool_version": "another"})

    outcome = race(run_store, theirs)

    assert theirs != ours
    assert (outcome.is_new, outcome.quarantined) == (True, "")
    assert run_store.get(KEYS.shard(1, "b")) == theirs


def test_a_shard_of_other_content_in_the_place_of_ours_is_quarantined(run_store: Store) -> None:
    commit = commit_rows(run_store, "b", [THREE_TURNS])
    ours = Builder(run_store, SPEC).shard_of(commit)

    outcome = race(run_store, write_shard(read_shard(ours)[:1], source_of(ours)))

    assert "other content" in outcome.quarantined
    assert outcome.provenance is None
