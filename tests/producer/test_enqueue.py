from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter

import pytest
import redis

import celeryconfig
from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import BatchMessage, Json, decode
from dflash_workers.contract.settings import Settings
from producer.enqueue import Sender, queue_of, send_planned
from producer.ledger import Ledger
from producer.reconcile import name_of
from tests.producer.campaign import Campaign, prompts


def list_of(campaign: Campaign, priority: int) -> str:
    return f"{campaign.queue}\x06\x16{priority}"


def queued(
    campaign: Campaign, client: redis.Redis, priority: int = celeryconfig.PRIORITY_ORDINARY
) -> list[Json]:
    """The messages that wait with a priority, the next in line first."""
    return [json.loads(m) for m in client.lrange(list_of(campaign, priority), 0, -1)[::-1]]


def send(campaign: Campaign, max_queued: int | None = None) -> int:
    ledger = Ledger(campaign.store, campaign.run)
    return send_planned(ledger, campaign.hints, queue_of(campaign.spec), max_queued=max_queued)


def test_every_planned_batch_gets_one_hint_and_is_pending(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    planned = campaign.plan(prompts("a", "b"), prompts("c"), prompts("d"))

    num_sent = send(campaign)

    messages = queued(campaign, redis_client)
    assert num_sent == 3
    assert {m["headers"]["task"] for m in messages} == {celeryconfig.GENERATE_TASK}
    names = [f"{campaign.run}/{name_of(batch)}" for batch in planned]
    assert [m["headers"]["id"] for m in messages] == names
    assert campaign.hints.queued_names(campaign.queue) == set(names)
    pending = redis_client.zrange(campaign.hints.keys.pending(campaign.run), 0, -1)
    assert set(pending) == {name_of(batch).encode() for batch in planned}


def test_celery_reads_a_hint_as_it_reads_a_task_that_it_sent_itself(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    (batch,) = campaign.plan(prompts("a"))
    send(campaign)
    campaign.hints.give_back(batch, campaign.queue)  # by Celery's own means

    with campaign.hints.app.connection_for_read() as connection:
        given_back, sent = (
            connection.SimpleQueue(campaign.queue, no_ack=True).get(timeout=10) for _ in range(2)
        )

    for message in (given_back, sent):
        _, kwargs, _ = message.decode()
        assert decode(BatchMessage, kwargs) == batch
    assert sent.headers.keys() == given_back.headers.keys()
    differing = {n for n in sent.headers if sent.headers[n] != given_back.headers[n]}
    assert differing == {"kwargsrepr", "ignore_result"}
    assert sent.content_type == given_back.content_type == "application/json"


@pytest.mark.parametrize("priority", [3, 6, 9])
def test_a_segments_priority_is_that_of_its_hints(
    campaign: Campaign, redis_client: redis.Redis, priority: int
) -> None:
    campaign.plan(prompts("a"), priority=priority)

    send(campaign)

    assert len(queued(campaign, redis_client, priority)) == 1
    assert redis_client.llen(list_of(campaign, priority)) == 1


def test_the_same_call_again_sends_nothing_while_its_hints_wait(campaign: Campaign) -> None:
    campaign.plan(prompts("a"), prompts("b"))
    send(campaign)

    assert send(campaign) == 0


def test_a_batch_that_was_planned_but_never_sent_is_sent_by_the_next_call(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    campaign.plan(prompts("a"), prompts("b"))
    send(campaign)
    redis_client.delete(list_of(campaign, celeryconfig.PRIORITY_ORDINARY))

    assert send(campaign) == 2


def test_what_is_done_or_held_is_not_sent(campaign: Campaign, redis_client: redis.Redis) -> None:
    done, busy, leased, left = campaign.plan(*(prompts(name) for name in "abcd"))
    campaign.commit(done)
    keys = campaign.hints.keys
    redis_client.zadd(keys.inflight(campaign.run), {name_of(busy): 1})
    redis_client.set(keys.lease(campaign.run, name_of(leased)), "somebody")

    assert send(campaign) == 1
    assert redis_client.zrange(keys.pending(campaign.run), 0, -1) == [name_of(left).encode()]


def test_what_was_imported_is_nobodys_work(campaign: Campaign) -> None:
    campaign.plan(prompts("a"), road="text")

    assert send(campaign) == 0


def test_nothing_is_sent_of_a_run_that_is_to_rest_and_that_is_said(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.plan(prompts("a"))
    control = Control(campaign.store, campaign.run)

    control.order(Action.PAUSE)
    assert send(campaign) == 0
    paused = capsys.readouterr().err
    control.order(Action.RESUME)
    assert send(campaign) == 1
    control.order(Action.CANCEL)
    assert send(campaign) == 0

    assert "is paused" in paused
    assert f"dflash-fleet resume --run {campaign.run}" in paused
    assert "is cancelled" in capsys.readouterr().err


def test_hints_that_could_not_go_out_early_go_out_at_the_end(
    campaign: Campaign, settings: Settings
) -> None:
    campaign.plan(prompts("a"), prompts("b"))
    campaign.plan(prompts("c"))
    ledger = Ledger(campaign.store, campaign.run)
    away = open_hints(dataclasses.replace(settings, redis_url="redis://127.0.0.1:9/0"))
    sender = Sender(ledger, away, campaign.queue)
    for segment in read_segments(campaign.store, campaign.run):
        ledger.take_in(segment)
        sender.send_segment(segment)

    with pytest.raises(QueueUnavailable):
        sender.finish()
    sender.hints = campaign.hints

    assert sender.finish() == 3
    assert campaign.hints.num_queued(campaign.queue) == 3


def test_a_new_run_s_hints_go_out_once_and_with_a_bound_at_the_end_only(campaign: Campaign) -> None:
    ledger = Ledger(campaign.store, campaign.run)
    early = Sender(ledger, campaign.hints, campaign.queue)
    bounded = Sender(ledger, campaign.hints, campaign.queue, max_queued=100)
    campaign.plan(prompts("a"), prompts("b"))
    (segment,) = read_segments(campaign.store, campaign.run)
    ledger.take_in(segment)

    bounded.send_segment(segment)
    assert campaign.hints.num_queued(campaign.queue) == 0
    early.send_segment(segment)

    assert (early.num_sent, early.finish(), bounded.finish()) == (2, 2, 0)
    assert campaign.hints.num_queued(campaign.queue) == 2


def test_more_hints_than_go_at_once_keep_their_order(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    planned = campaign.plan(*(prompts(f"p{n}") for n in range(250)))

    assert send(campaign, max_queued=10_000) == 250
    ids = [message["headers"]["id"] for message in queued(campaign, redis_client)]
    assert ids == [f"{campaign.run}/{name_of(batch)}" for batch in planned]


def test_a_full_queue_is_waited_for_and_said_once(
    campaign: Campaign,
    redis_client: redis.Redis,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("producer.enqueue.POLL_S", 0.05)
    campaign.plan(prompts("a"))
    redis_client.lpush(campaign.queue, "somebody else's")
    sent = Counter[str]()

    def send_when_there_is_room() -> None:
        sent["hints"] = send(campaign, max_queued=1)

    sender = threading.Thread(target=send_when_there_is_room)
    sender.start()
    sender.join(timeout=1)
    assert sender.is_alive()
    redis_client.delete(campaign.queue)
    sender.join(timeout=20)

    assert sent["hints"] == 1
    assert capsys.readouterr().err.count("waiting for workers") == 1
