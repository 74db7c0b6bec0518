from __future__ import annotations

from collections import Counter

import pytest

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import Refusal
from producer.audit import audit
from producer.garbage import Garbage, find_garbage, remove
from producer.reconcile import name_of
from tests.producer.campaign import Campaign, prompts, requests_of

REFUSALS = (Refusal("rows.jsonl:9", "no_messages", "", "{}"),)


def found(campaign: Campaign) -> list[Garbage]:
    return find_garbage(campaign.store, campaign.hints, campaign.run)


def everything(campaign: Campaign) -> set[str]:
    return {key for key, _size in campaign.store.list(f"{campaign.run}/")}


@pytest.fixture
def leftovers(campaign: Campaign) -> dict[str, str]:
    """A run with every kind of object that may look like garbage; name -> key."""
    done, open_batch = campaign.plan(prompts("a"), prompts("b"), refusals=REFUSALS)
    campaign.commit(done)
    keys = RunKeys(campaign.run)
    leftovers = {
        "data that lost": keys.data(0, done.batch, "slow"),
        "data of a batch without a commit": keys.data(0, open_batch.batch, "running"),
        "prompts that lost the number": keys.prompts(0, "0" * 16),
        "refusals that lost the number": keys.refusals(0, "0" * 16),
        "prompts of a segment to come": keys.prompts(1, "1" * 16),
        "refusals of a segment to come": keys.refusals(1, "1" * 16),
    }
    for key in leftovers.values():
        campaign.store.put_new(key, b"12345")
    return leftovers


def test_only_what_no_reader_can_ever_follow_is_garbage(
    campaign: Campaign, leftovers: dict[str, str]
) -> None:
    before = everything(campaign)

    garbage = found(campaign)
    remove(campaign.store, garbage)

    gone = {name for name, key in leftovers.items() if key in before - everything(campaign)}
    assert gone == {
        "data that lost",
        "prompts that lost the number",
        "refusals that lost the number",
    }
    assert len(before - everything(campaign)) == 3
    assert Counter(item.kind for item in garbage) == {"lost_data": 1, "unlisted_plan": 2}
    assert {item.num_bytes for item in garbage} == {5}
    assert audit(campaign.store, campaign.run).findings == []


def test_finding_deletes_nothing(campaign: Campaign, leftovers: dict[str, str]) -> None:
    before = everything(campaign)

    assert found(campaign)

    assert everything(campaign) == before
    assert set(leftovers.values()) <= before


def test_a_paused_run_keeps_the_data_of_its_open_batches(
    campaign: Campaign, leftovers: dict[str, str]
) -> None:
    Control(campaign.store, campaign.run).order(Action.PAUSE)

    garbage = {item.key for item in found(campaign)}

    assert leftovers["data of a batch without a commit"] not in garbage


def test_a_cancelled_run_loses_data_without_a_commit_once_nobody_works_on_it(
    campaign: Campaign, leftovers: dict[str, str]
) -> None:
    (late,) = campaign.plan(prompts("c"))
    inflight = campaign.hints.keys.inflight(campaign.run)
    campaign.hints.redis.zadd(inflight, {name_of(late): 1})
    Control(campaign.store, campaign.run).order(Action.CANCEL)

    with pytest.raises(Conflict, match="1 batches are still in workers' hands"):
        found(campaign)
    campaign.hints.redis.delete(inflight)
    garbage = {item.key: item.kind for item in found(campaign)}

    assert garbage[leftovers["data of a batch without a commit"]] == "cancelled_data"
    named = {key for key, _size in campaign.store.list(f"{campaign.run}/data/")} - garbage.keys()
    assert [key.rpartition("/")[2] for key in named] == ["attempt.jsonl.zst"]


def test_an_empty_run_has_no_garbage(campaign: Campaign) -> None:
    assert found(campaign) == []


def test_a_batch_with_one_data_object_costs_no_request(campaign: Campaign) -> None:
    asked, costs = requests_of(campaign.store), []
    for num_batches in (2, 6):
        for message in campaign.plan(*[prompts(f"{num_batches}-{n}") for n in range(num_batches)]):
            campaign.commit(message)
        asked.clear()
        assert find_garbage(campaign.store, campaign.hints, campaign.run) == []
        costs.append(Counter(asked))

    assert costs[1] - costs[0] == {"GetObject": 1}  # the second segment
