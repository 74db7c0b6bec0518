"""The log of shards in their order of use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.store import Store
from trainer.online.order import Found, NamedShard, Order, OrderEntry, RefusedShard

RUN, NAME = "r", "one"


def order(store: Store) -> Order:
    return Order(store, RUN, NAME)


def shards(*names: str) -> Found:
    return Found([NamedShard(name, "a" * 64, [3, 4], [9, 0]) for name in names])


def names(log: Order) -> list[str]:
    return [shard.key for shard in log.shards]


def test_a_follower_reads_what_the_leader_wrote_in_its_order(store: Store) -> None:
    leader, follower = order(store), order(store)

    leader.append(shards("b", "a"))
    leader.append(Found(refused=[RefusedShard("x", "damaged")]))
    leader.append(shards("c"))

    assert follower.follow()
    assert names(follower) == names(leader) == ["b", "a", "c"]
    assert follower.refused == {"x": "damaged"}
    assert follower.shards[0].lengths.tolist() == [9, 0]
    assert follower.shards[0].prompt_lens.tolist() == [3, 4]
    assert not follower.is_finished
    assert not follower.follow()


def test_an_entry_says_how_many_shards_were_dealt_with_so_far(store: Store) -> None:
    leader = order(store)

    leader.append(shards("a", "b"))
    leader.append(Found(refused=[RefusedShard("x", "damaged"), RefusedShard("a", "changed")]))
    leader.append(Found(finished=True))

    keys = [RunKeys(RUN).order_entry(NAME, n) for n in range(3)]
    assert [load(OrderEntry, store.get(key)).num_shards for key in keys] == [2, 3, 3]


def test_a_shard_is_named_once_whoever_names_it_again(store: Store) -> None:
    one, other = order(store), order(store)

    one.append(shards("a", "b"))
    other.append(shards("b", "c"))
    one.append(shards("a", "c"))

    one.follow()
    assert names(one) == names(other) == ["a", "b", "c"]
    assert not store.exists(RunKeys(RUN).order_entry(NAME, 2))


def test_leaders_of_one_name_that_race_end_with_one_order(store: Store) -> None:
    logs = [order(store) for _ in range(4)]

    def name_all(log: Order) -> None:
        for number in range(5):
            log.append(shards(f"s{number}", f"own-{id(log)}-{number}"))

    with ThreadPoolExecutor(len(logs)) as racing:
        list(racing.map(name_all, logs))

    for log in logs:
        log.follow()
    assert len({tuple(names(log)) for log in logs}) == 1
    assert len(set(names(logs[0]))) == len(names(logs[0])) == 5 + 4 * 5


def test_nothing_is_named_behind_the_end(store: Store) -> None:
    leader, late = order(store), order(store)
    leader.append(shards("a"))
    leader.append(Found(finished=True))

    late.append(shards("b"))
    late.append(Found(finished=True))

    assert late.is_finished
    assert names(late) == ["a"]
    assert not store.exists(RunKeys(RUN).order_entry(NAME, 2))


def test_a_named_shard_that_went_bad_is_refused_even_behind_the_end(store: Store) -> None:
    leader = order(store)
    leader.append(shards("a"))
    leader.append(Found(finished=True))

    leader.append(Found(refused=[RefusedShard("a", "changed")]))

    follower = order(store)
    follower.follow()
    assert follower.refused == {"a": "changed"}
    assert names(follower) == ["a"]


def test_a_log_of_another_version_is_refused(store: Store) -> None:
    entry = OrderEntry(99, 0, [], [], 0, finished=False)
    store.put_new(RunKeys(RUN).order_entry(NAME, 0), dump(entry))

    with pytest.raises(BadInput, match="schema 99"):
        order(store).follow()
