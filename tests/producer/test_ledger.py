from __future__ import annotations

import pytest

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from producer.ledger import Ledger, Progress
from producer.reconcile import name_of
from producer.segments import read_log
from tests.producer.campaign import Campaign, prompts


def test_batches_leave_with_their_commit_and_join_with_their_segment(campaign: Campaign) -> None:
    first, second, third = campaign.plan(prompts("a", "b"), prompts("c", "d"), prompts("e"))
    ledger = Ledger(campaign.store, campaign.run)
    ledger.refresh()
    before = ledger.progress()

    campaign.commit(first)
    campaign.commit(third)
    (fourth,) = campaign.plan(prompts("f"))
    campaign.plan(sealed=True)
    ledger.refresh()

    assert before == Progress(5, 0, 3, 0, sealed=False)
    assert ledger.uncommitted() == [second, fourth]
    assert ledger.progress() == Progress(6, 3, 4, 2, sealed=True)


def test_a_prompt_that_is_planned_again_counts_once_and_is_not_done(campaign: Campaign) -> None:
    (first,) = campaign.plan(prompts("a", "b"))
    campaign.commit(first, {"b": "context_length"})
    (again,) = campaign.plan(prompts("b", generation=1))
    ledger = Ledger(campaign.store, campaign.run)

    ledger.refresh()
    waiting = ledger.progress()
    campaign.commit(again)
    ledger.refresh()

    assert waiting == Progress(2, 1, 2, 1, sealed=False)
    assert ledger.progress() == Progress(2, 2, 2, 2, sealed=False)


def test_imported_batches_are_nobody_s_to_send_but_open_all_the_same(campaign: Campaign) -> None:
    (imported,) = campaign.plan(prompts("a"), road="text", priority=3)
    (planned,) = campaign.plan(prompts("b"), priority=9)
    ledger = Ledger(campaign.store, campaign.run)

    ledger.refresh()

    assert ledger.uncommitted() == [planned]
    assert ledger.uncommitted("text") == [imported]
    assert ledger.progress().num_batches_done == 0
    assert (ledger.priority_of(imported), ledger.priority_of(planned)) == (3, 9)


def test_an_empty_run_has_nothing_open(campaign: Campaign) -> None:
    ledger = Ledger(campaign.store, campaign.run)

    ledger.refresh()

    assert ledger.progress() == Progress(0, 0, 0, 0, sealed=False)


def test_a_batch_is_named_by_its_segment_and_its_hash(campaign: Campaign) -> None:
    (message,) = campaign.plan(prompts("a"))

    assert name_of(message) == f"0/{message.batch}"


def test_who_reads_the_log_reads_it_for_the_ledger_too(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = campaign.plan(prompts("a"), prompts("b", "c"))
    campaign.commit(first)
    ledger = read_log(campaign.store, campaign.run).ledger
    reads: list[str] = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda store, key: reads.append(key) or get(store, key))

    ledger.refresh()

    assert ledger.uncommitted() == [second]
    assert ledger.progress() == Progress(3, 1, 2, 1, sealed=False)
    assert reads == [RunKeys(campaign.run).segment(1)]  # whether there are more


def test_a_refresh_lists_only_segments_that_are_begun_and_not_done(campaign: Campaign) -> None:
    done = campaign.plan(prompts("a"), prompts("b"))
    begun, _open = campaign.plan(prompts("c"), prompts("d"))
    for number in range(5):
        campaign.plan(prompts(f"later {number}"))
    for message in (*done, begun):
        campaign.commit(message)
    ledger = Ledger(campaign.store, campaign.run)
    ledger.refresh()
    listed: list[str] = []
    campaign.store.client.meta.events.register(
        "provide-client-params.s3.ListObjectsV2",
        lambda params, **_: listed.append(params["Prefix"].rpartition("/commits/")[2]),
    )

    ledger.refresh()

    assert listed == ["", "000001/"]
