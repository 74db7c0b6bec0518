from __future__ import annotations

import dataclasses
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import PlannedBatch, Refusal
from producer.audit import Audit, BatchLook, Fates, Outcome, audit
from tests.producer.campaign import Campaign, prompts, requests_of

REFUSALS = (Refusal("rows.jsonl:9", "no_messages", "", "{}"),)


def audited(campaign: Campaign) -> Audit:
    return audit(campaign.store, campaign.run)


def test_a_run_whose_every_row_and_prompt_has_one_fate_is_whole(campaign: Campaign) -> None:
    first, second = campaign.plan(
        prompts("a", "b", "c"),
        prompts("d"),
        refusals=REFUSALS,
        num_rows=8,
        num_duplicates=2,
        num_not_drawn=1,
    )
    waiting = audited(campaign)
    campaign.commit(first, {"b": "context_length"})
    campaign.commit(second)

    whole = audited(campaign)

    assert (waiting.num_prompts, waiting.num_waiting, waiting.is_whole) == (4, 4, False)
    assert (whole.num_completed, whole.num_rejected, whole.num_data_objects) == (3, 1, 2)
    assert (whole.num_rows, whole.num_refused, whole.num_duplicates) == (8, 1, 2)
    assert (whole.is_whole, whole.findings) == (True, [])


def test_a_prompt_s_fate_is_that_of_its_highest_generation(campaign: Campaign) -> None:
    (first,) = campaign.plan(prompts("a", "b", "c"))
    campaign.commit(first, {"b": "context_length", "c": "poison"})
    (again,) = campaign.plan(prompts("b", "c", generation=1))
    waiting = audited(campaign)
    campaign.commit(again, {"c": "poison"})

    done = audited(campaign)

    assert (waiting.num_prompts, waiting.num_completed, waiting.num_waiting) == (3, 1, 2)
    assert (done.num_completed, done.num_rejected, done.num_retried) == (2, 1, 2)
    assert done.findings == []


def test_second_samples_are_prompts_and_no_rows(campaign: Campaign) -> None:
    campaign.plan(prompts("a", "a#1", "b", "b#1"), num_rows=2, num_resampled=2)

    assert audited(campaign).findings == []


def change_data(campaign: Campaign) -> None:
    key, _ = next(campaign.store.list(f"{campaign.run}/data/"))
    campaign.store.replace(key, campaign.store.get(key) + b"\0")


def lose_data(campaign: Campaign) -> None:
    key, _ = next(campaign.store.list(f"{campaign.run}/data/"))
    campaign.store.delete(key)


def lose_prompts(campaign: Campaign) -> None:
    key, _ = next(campaign.store.list(f"{campaign.run}/plan/prompts/"))
    campaign.store.delete(key)


def commit_nothing_planned(campaign: Campaign) -> None:
    keys = RunKeys(campaign.run)
    key, _ = next(campaign.store.list(keys.commits))
    campaign.store.put_new(keys.commit(7, "nobody"), campaign.store.get(key))


def plan_twice(campaign: Campaign) -> None:
    campaign.plan(prompts("a"))


def plan_a_completed_prompt_again(campaign: Campaign) -> None:
    (message,) = campaign.plan(prompts("a", generation=1))
    campaign.commit(message)


def retry_before_there_is_a_fate(campaign: Campaign) -> None:
    campaign.plan(prompts("new"))
    campaign.plan(prompts("new", generation=1))


def skip_a_generation(campaign: Campaign) -> None:
    campaign.plan(prompts("b", generation=2))


def leave_a_gap_in_the_log(campaign: Campaign) -> None:
    campaign.num_segments += 1
    campaign.plan(prompts("behind"))


def plan_after_the_seal(campaign: Campaign) -> None:
    campaign.plan(sealed=True)
    campaign.plan(prompts("late"))


def lose_rows(campaign: Campaign) -> None:
    campaign.plan(prompts("x", "y"), num_rows=3)


def list_more_refusals_than_counted(campaign: Campaign) -> None:
    campaign.plan(refusals=REFUSALS * 2, num_refused=1, num_rows=1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (change_data, ["sha256 differs", "without a fate: 'a', 'b', 'c'"]),
        (lose_data, ["/attempt.jsonl.zst", "without a fate: 'a', 'b', 'c'"]),
        (lose_prompts, ["/plan/prompts/", "batch 0/"]),
        (commit_nothing_planned, ["7/nobody: no segment lists this batch"]),
        (plan_twice, ["'a': planned more than once"]),
        (plan_a_completed_prompt_again, ["'a': completed as generation 0, yet planned again"]),
        (retry_before_there_is_a_fate, ["'new': planned as generation 1 while 0 has no commit"]),
        (skip_a_generation, ["'b': planned as generation 2, never as 1"]),
        (leave_a_gap_in_the_log, ["segment 2: stands behind a gap"]),
        (plan_after_the_seal, ["segment 2: planned after the run's seal"]),
        (lose_rows, ["segment 1: 3 rows have 2 fates"]),
        (list_more_refusals_than_counted, ["segment 1: 1 rows refused", "lists 2"]),
    ],
)
def test_each_fault_is_found_and_named(
    campaign: Campaign, fault: Callable[[Campaign], None], words: list[str]
) -> None:
    (message,) = campaign.plan(prompts("a", "b", "c"))
    campaign.commit(message, {"b": "context_length"})
    assert audited(campaign).is_whole

    fault(campaign)
    result = audited(campaign)

    assert [w for w in words if not any(w in finding for finding in result.findings)] == []
    assert not result.is_whole
    fates = result.num_completed + result.num_rejected + result.num_waiting + result.num_unproven
    assert fates == result.num_prompts


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rejected": []}, "'b' has 0 fates"),
        ({"batch": "another"}, "its commit is that of another batch"),
        ({"road": "text"}, "its commit is that of another batch or road"),
        ({"num_rows": 1}, "its commit says 1"),
    ],
)
def test_a_commit_that_is_wrong_is_found(
    campaign: Campaign, changed: dict[str, Any], words: str
) -> None:
    (message,) = campaign.plan(prompts("a", "b", "c"))
    commit = campaign.commit(message, {"b": "context_length"})
    key = RunKeys(campaign.run).commit(message.segment, message.batch)

    campaign.store.replace(key, dump(dataclasses.replace(commit, **changed)))

    assert [words in finding for finding in audited(campaign).findings] == [True]


def test_a_prompt_with_two_fates_is_found(campaign: Campaign) -> None:
    (message,) = campaign.plan(prompts("a", "b"))
    commit = campaign.commit(message, {"b": "context_length"})
    key = RunKeys(campaign.run).commit(message.segment, message.batch)
    (rejection,) = commit.rejected
    twice = dataclasses.replace(commit, rejected=[rejection, rejection])

    campaign.store.replace(key, dump(twice))

    (finding,) = audited(campaign).findings
    assert "prompt 'b' has 2 fates" in finding


def test_rows_of_another_batch_are_found(campaign: Campaign) -> None:
    first, second = campaign.plan(prompts("a"), prompts("b"))
    campaign.commit(first)
    other = campaign.commit(second)
    keys = RunKeys(campaign.run)
    mixed = dataclasses.replace(other, batch=first.batch)

    campaign.store.replace(keys.commit(0, first.batch), dump(mixed))

    findings = "\n".join(audited(campaign).findings)
    assert "prompt 'a' has 0 fates" in findings
    assert "never planned in it: 'b'" in findings


@pytest.mark.slow
def test_a_million_prompts_are_kept_in_little_memory() -> None:
    num_prompts, batch_size = 1_000_000, 100
    fates = Fates()

    tracemalloc.start()
    for start in range(0, num_prompts, batch_size):
        keys = [f"{n:032x}" for n in range(start, start + batch_size)]
        batch = PlannedBatch("b", keys, [], [], 0, 0)
        look = BatchLook(keys, [Outcome.COMPLETED] * batch_size)
        assert list(fates.add(batch, look)) == []
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    result = Audit()
    fates.count_into(result)
    assert result.num_completed == num_prompts
    assert kept_bytes < 200 * num_prompts


def test_each_batch_costs_three_reads_and_no_listing_of_its_own(campaign: Campaign) -> None:
    asked, costs = requests_of(campaign.store), []
    for num_batches in (2, 6):
        for message in campaign.plan(*[prompts(f"{num_batches}-{n}") for n in range(num_batches)]):
            campaign.commit(message)
        asked.clear()
        assert audit(campaign.store, campaign.run).is_whole
        costs.append(Counter(asked))

    more = costs[1] - costs[0]
    assert more == {"GetObject": 1 + 6 * 3}  # a segment; its prompts, commits and data
