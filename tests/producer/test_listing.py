from __future__ import annotations

import pytest

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.keys import RunKeys
from producer.listing import list_runs
from tests.producer.campaign import Campaign, prompts, spec_of


def another(campaign: Campaign, name: str) -> Campaign:
    return Campaign(campaign.store, campaign.hints, spec_of(name))


def test_runs_are_found_by_name_whatever_else_lies_in_the_bucket(campaign: Campaign) -> None:
    names = {campaign.run, f"{campaign.run}-1", "another", "zebra"}
    for name in names:
        another(campaign, name).plan(prompts("a"))
    campaign.store.replace("a-loose-file", b"")

    assert set(list_runs(campaign.store)) == names


def test_each_run_is_listed_with_its_state_and_counts(campaign: Campaign) -> None:
    first, _ = campaign.plan(prompts("a", "b"), prompts("c"))
    campaign.commit(first)
    campaign.plan(sealed=True)
    for name, action in (("paused", Action.PAUSE), ("cancelled", Action.CANCEL)):
        another(campaign, name).plan(prompts("a"))
        Control(campaign.store, name).order(action)

    found = list_runs(campaign.store)

    assert found[campaign.run] == {
        "target": "tiny",
        "state": "active",
        "num_prompts": 3,
        "num_prompts_done": 2,
        "num_batches": 2,
        "num_batches_done": 1,
        "sealed": True,
    }
    assert (found["paused"]["state"], found["paused"]["sealed"]) == ("paused", False)
    assert found["cancelled"]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not JSON", "not JSON"),
        (b'{"name": "of another system"}', "unknown field"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_run_that_can_not_be_read_is_listed_with_its_error(
    campaign: Campaign, body: bytes, words: str
) -> None:
    campaign.plan(prompts("a"))
    campaign.store.replace(RunKeys("broken").spec, body)
    campaign.store.replace("no-run/at/all", b"")

    found = list_runs(campaign.store)

    assert found.keys() == {campaign.run, "broken"}
    assert words in found["broken"]["error"]
    assert found[campaign.run]["num_prompts"] == 1


def test_a_run_whose_log_is_damaged_is_listed_with_its_error(campaign: Campaign) -> None:
    campaign.plan(prompts("a"))
    campaign.store.replace(RunKeys(campaign.run).segment(0), b"{")

    assert "Segment" in list_runs(campaign.store)[campaign.run]["error"]
