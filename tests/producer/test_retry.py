from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import PlannedBatch, Prompt
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from producer.audit import audit
from producer.ledger import Ledger
from producer.plan import seal
from producer.retry import RetryOptions, RetryReport, retry
from tests.producer.campaign import Campaign, prompts

LONG = frozenset({"context_length"})


@pytest.fixture
def rejected(campaign: Campaign) -> Campaign:
    """A run with one answer, two prompts that were too long, and a poisonous one."""
    first, second = campaign.plan(prompts("a", "b"), prompts("c", "d", sampling={"top_k": 5}))
    campaign.commit(first, {"b": "context_length"})
    campaign.commit(second, {"c": "context_length", "d": "poison"})
    return campaign


def again(campaign: Campaign, reasons: frozenset[str] = LONG, **facts: Any) -> RetryReport:
    options = RetryOptions(reasons, **facts)
    return retry(campaign.store, campaign.hints, campaign.spec, options)


def retried(campaign: Campaign) -> list[tuple[PlannedBatch, list[Prompt]]]:
    """The batches of a generation over 0, with their prompts."""
    return [
        (batch, read_prompts(campaign.store, segment, batch))
        for segment in read_segments(campaign.store, campaign.run)
        for batch in segment.batches
        if batch.generation
    ]


def test_prompts_of_a_reason_are_planned_one_generation_higher_and_sent(
    rejected: Campaign,
) -> None:
    report = again(rejected, sampling={"max_new_tokens": 512})

    ((batch, planned),) = retried(rejected)
    assert (batch.generation, batch.sampling) == (1, {"max_new_tokens": 512})
    assert [(p.id, p.generation, p.sampling) for p in planned] == [
        ("b", 1, {"max_new_tokens": 512}),
        ("c", 1, {"max_new_tokens": 512, "top_k": 5}),
    ]
    assert planned[0].turns == prompts("b")[0].turns
    assert (report.num_rejected, report.num_planned, report.num_sent) == (2, 2, 1)
    (name,) = rejected.hints.queued_names(rejected.queue)
    assert name.endswith(batch.batch)
    assert audit(rejected.store, rejected.run).findings == []


def test_the_same_command_twice_makes_the_same_batch_once(rejected: Campaign) -> None:
    again(rejected)

    report = again(rejected)

    assert len(retried(rejected)) == 1
    assert (report.num_rejected, report.num_planned, report.num_sent) == (0, 0, 0)


def test_a_retry_that_died_before_it_sent_is_sent_by_the_next(
    rejected: Campaign, redis_client: redis.Redis
) -> None:
    again(rejected)
    for key in redis_client.scan_iter(f"{rejected.queue}*"):
        redis_client.delete(key)

    assert again(rejected).num_sent == 1


def test_two_retries_at_once_plan_each_prompt_once(rejected: Campaign, settings: Settings) -> None:
    ids = [f"p{n}" for n in range(40)]
    (message,) = rejected.plan(prompts(*ids))
    rejected.commit(message, dict.fromkeys(ids, "context_length"))
    reports: list[RetryReport] = []
    start = threading.Barrier(3)

    def run_one(temperature: float) -> None:
        store, hints = open_store(settings), open_hints(settings)
        options = RetryOptions(LONG, {"temperature": temperature}, batch_size=4)
        start.wait()
        reports.append(retry(store, hints, rejected.spec, options))
        store.client.close()
        hints.app.close()
        hints.redis.close()

    racers = [threading.Thread(target=run_one, args=(0.1 * n,)) for n in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    planned = [prompt.id for _, batch in retried(rejected) for prompt in batch]
    assert sorted(planned) == sorted([*ids, "b", "c"])
    assert sum(report.num_planned for report in reports) == 42
    assert audit(rejected.store, rejected.run).findings == []


def test_a_prompt_that_is_rejected_again_goes_up_one_generation_more(rejected: Campaign) -> None:
    again(rejected)
    ledger = Ledger(rejected.store, rejected.run)
    ledger.refresh()
    (message,) = ledger.uncommitted()
    rejected.commit(message, {"b": "context_length"})

    report = again(rejected, frozenset({"context_length", "poison"}))

    assert report.reasons == {"context_length": 1, "poison": 1}
    planned = [(p.id, p.generation) for _, batch in retried(rejected) for p in batch]
    assert planned == [("b", 1), ("c", 1), ("d", 1), ("b", 2)]
    assert audit(rejected.store, rejected.run).findings == []


def test_a_dry_run_counts_and_writes_nothing(rejected: Campaign) -> None:
    report = again(rejected, dry_run=True)

    assert (report.reasons, report.num_planned) == ({"context_length": 2}, 0)
    assert retried(rejected) == []
    assert rejected.hints.num_queued(rejected.queue) == 0


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_new_tokens": 4096}, "max tokens"),
        ({"max_new_tokens": 0}, "max tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_overrides_out_of_the_target_s_bounds_are_refused(
    rejected: Campaign, sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        again(rejected, sampling=sampling)

    assert retried(rejected) == []


def test_a_sealed_run_is_retried_and_stays_sealed(rejected: Campaign) -> None:
    seal(rejected.store, rejected.run)

    report = again(rejected)

    *_, sealed, retried = read_segments(rejected.store, rejected.run)
    assert report.num_planned == 2
    assert (sealed.sealed, retried.sealed, retried.batches[0].generation) == (True, True, 1)
    assert audit(rejected.store, rejected.run).findings == []


def test_a_cancelled_run_is_not_planned_in(rejected: Campaign) -> None:
    Control(rejected.store, rejected.run).order(Action.CANCEL)
    with pytest.raises(Conflict, match="cancelled"):
        again(rejected)


def test_a_paused_run_is_planned_in_and_sent_when_it_is_resumed(rejected: Campaign) -> None:
    Control(rejected.store, rejected.run).order(Action.PAUSE)

    report = again(rejected)

    assert (report.num_planned, report.num_sent) == (2, 0)
