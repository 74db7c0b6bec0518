"""Which shards are read."""

from __future__ import annotations

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from trainer.tokens.reading import list_shards


def test_shards_are_listed_in_order_and_alone(store: Store) -> None:
    keys = RunKeys("run")
    wanted = [keys.shard(1, "b"), keys.shard(1, "c"), keys.shard(2, "a")]
    for key in [*reversed(wanted), RunKeys("run2").shard(1, "z"), keys.tokens + "note.txt"]:
        store.put_new(key, b"x")

    assert list_shards(store, "run") == wanted
