from __future__ import annotations

import threading
import time

import pytest
import redis

import celeryconfig
from dflash_workers.contract.control import Action, Control, RunState
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.records import BatchMessage
from producer.ledger import Ledger
from producer.reconcile import LEASE_S, Reconciler, lost_hints, name_of, offer
from tests.producer.campaign import Campaign, prompts, requests_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands unless it is moved: its one number."""
    now_s = [1000.0]
    monkeypatch.setattr("producer.reconcile.time.monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def batches(campaign: Campaign) -> list[BatchMessage]:
    """Four planned batches."""
    return campaign.plan(*[prompts(f"p{n}") for n in range(4)])


def reconciler_of(campaign: Campaign) -> Reconciler:
    return Reconciler(Ledger(campaign.store, campaign.run), campaign.hints, campaign.queue)


def looks(reconciler: Reconciler, clock: list[float], num_looks: int) -> list[int]:
    """What each look sent, one lease apart."""
    sent = []
    for _ in range(num_looks):
        sent.append(reconciler.look())
        clock[0] += LEASE_S
    return sent


def send_all(campaign: Campaign) -> int:
    ledger = Ledger(campaign.store, campaign.run)
    lost = lost_hints(ledger, campaign.hints, campaign.queue)
    return offer(ledger, campaign.hints, campaign.queue, lost)


def lists_of(campaign: Campaign) -> list[str]:
    queue = campaign.queue
    return [f"{queue}\x06\x16{s}" if s else queue for s in celeryconfig.PRIORITY_STEPS]


def lose_hint(campaign: Campaign, client: redis.Redis, message: BatchMessage) -> None:
    """Take one message out of the queue, as a worker does that dies of it."""
    for name in lists_of(campaign):
        for hint in client.lrange(name, 0, -1):
            if message.batch.encode() in hint:
                client.lrem(name, 0, hint)  # type: ignore[arg-type]


def test_after_a_flush_exactly_the_batches_without_a_commit_come_back(
    campaign: Campaign, redis_client: redis.Redis, batches: list[BatchMessage], clock: list[float]
) -> None:
    send_all(campaign)
    reconciler = reconciler_of(campaign)
    campaign.commit(batches[0], {"p0": "context_length"})
    redis_client.flushall()

    sent = looks(reconciler, clock, 4)

    assert sent == [0, 3, 0, 0]
    queued = campaign.hints.queued_names(campaign.queue)
    assert queued == {f"{campaign.run}/{name_of(batch)}" for batch in batches[1:]}


def test_one_lost_hint_is_sent_again_while_the_others_wait(
    campaign: Campaign, redis_client: redis.Redis, batches: list[BatchMessage], clock: list[float]
) -> None:
    send_all(campaign)
    reconciler = reconciler_of(campaign)
    assert looks(reconciler, clock, 3) == [0, 0, 0]

    lose_hint(campaign, redis_client, batches[2])
    sent = looks(reconciler, clock, 3)

    assert sent == [0, 1, 0]
    assert campaign.hints.num_queued(campaign.queue) == 4


def test_what_somebody_works_on_or_looks_lost_only_once_is_left_alone(
    campaign: Campaign, redis_client: redis.Redis, batches: list[BatchMessage], clock: list[float]
) -> None:
    inflight = campaign.hints.keys.inflight(campaign.run)
    redis_client.zadd(inflight, {name_of(batch): 1.0 for batch in batches[:3]})
    reconciler = reconciler_of(campaign)
    offer(reconciler.ledger, campaign.hints, campaign.queue, [])

    first = reconciler.look()
    redis_client.zrem(inflight, name_of(batches[0]))
    redis_client.zadd(inflight, {name_of(batches[3]): 1.0})
    clock[0] += LEASE_S
    second = reconciler.look()

    assert (first, second) == (0, 0)


def test_two_looks_within_one_lease_are_one(
    campaign: Campaign, batches: list[BatchMessage], clock: list[float]
) -> None:
    reconciler = reconciler_of(campaign)

    sent = [reconciler.look()]
    clock[0] += LEASE_S - 0.1
    sent.append(reconciler.look())
    clock[0] += 0.1
    sent.append(reconciler.look())

    assert sent == [0, 0, len(batches)]


def test_a_repeated_call_sends_at_once_what_is_pending_but_in_no_list(
    campaign: Campaign, redis_client: redis.Redis, batches: list[BatchMessage]
) -> None:
    sent = [send_all(campaign), send_all(campaign)]
    lose_hint(campaign, redis_client, batches[1])
    sent.append(send_all(campaign))

    assert sent == [4, 0, 1]


def test_each_batch_is_sent_with_its_segment_s_priority_and_imports_never(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    campaign.plan(prompts("soon"), priority=3)
    campaign.plan(prompts("late"), prompts("later"), priority=9)
    campaign.plan(prompts("imported"), road="text")

    num_sent = send_all(campaign)

    assert num_sent == 3
    assert [redis_client.llen(name) for name in lists_of(campaign)] == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("action", "state"),
    [(Action.PAUSE, RunState.PAUSED), (Action.CANCEL, RunState.CANCELLED)],
)
@pytest.mark.usefixtures("batches")
def test_nothing_is_sent_of_a_paused_or_cancelled_run(
    campaign: Campaign, clock: list[float], action: Action, state: RunState
) -> None:
    reconciler = reconciler_of(campaign)
    reconciler.look()
    clock[0] += LEASE_S

    Control(campaign.store, campaign.run).order(action)
    sent = looks(reconciler, clock, 3)

    assert sent == [0, 0, 0]
    assert reconciler.state is state


@pytest.mark.usefixtures("batches")
def test_a_resumed_run_is_looked_at_afresh(campaign: Campaign, clock: list[float]) -> None:
    control, reconciler = Control(campaign.store, campaign.run), reconciler_of(campaign)
    looks(reconciler, clock, 1)
    control.order(Action.PAUSE)
    looks(reconciler, clock, 1)

    control.order(Action.RESUME)

    assert looks(reconciler, clock, 3) == [0, 4, 0]


def test_rejected_prompts_are_done_and_ask_for_nothing_more(
    campaign: Campaign, batches: list[BatchMessage], clock: list[float]
) -> None:
    for number, batch in enumerate(batches):
        campaign.commit(batch, {f"p{number}": "context_length"})

    sent = looks(reconciler_of(campaign), clock, 3)

    assert sent == [0, 0, 0]
    assert campaign.hints.num_queued(campaign.queue) == 0


def test_hints_that_move_while_they_are_read_are_not_missed(
    campaign: Campaign, redis_client: redis.Redis
) -> None:
    staying = [BatchMessage(campaign.run, 1, f"stays{n}") for n in range(2500)]
    passing = [BatchMessage(campaign.run, 2, f"passes{n}") for n in range(400)]
    oldest = BatchMessage(campaign.run, 0, "oldest")
    campaign.hints.offer([oldest] * 400, campaign.queue, celeryconfig.PRIORITY_ORDINARY)
    campaign.hints.offer(staying, campaign.queue, celeryconfig.PRIORITY_ORDINARY)
    ordinary = lists_of(campaign)[2]
    over = threading.Event()

    def come_and_go() -> None:
        for message in passing:
            campaign.hints.offer([message], campaign.queue, celeryconfig.PRIORITY_ORDINARY)
            redis_client.rpop(ordinary)
        over.set()

    traffic = threading.Thread(target=come_and_go)
    traffic.start()
    readings = []
    while not over.is_set():
        readings.append(campaign.hints.queued_names(campaign.queue))
    traffic.join()

    names = {f"{campaign.run}/1/{message.batch}" for message in staying}
    assert len(readings) > 1
    assert all(names <= reading for reading in readings)


def test_a_full_redis_is_one_clear_error_and_the_next_call_goes_on(
    campaign: Campaign, redis_client: redis.Redis, batches: list[BatchMessage]
) -> None:
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueUnavailable, match="maxmemory"):
            send_all(campaign)
    finally:
        redis_client.config_set("maxmemory", 0)

    assert send_all(campaign) == len(batches)


@pytest.mark.slow
def test_a_look_at_20000_batches_takes_seconds(campaign: Campaign, clock: list[float]) -> None:
    for segment in range(20):
        campaign.plan(*[prompts(f"{segment}-{n}") for n in range(1000)])
    ledger = Ledger(campaign.store, campaign.run)
    ledger.refresh()
    messages = ledger.uncommitted()
    assert offer(ledger, campaign.hints, campaign.queue, messages) == 20_000
    reconciler = reconciler_of(campaign)

    started_s = time.perf_counter()
    first = reconciler.look()
    clock[0] += LEASE_S
    second = reconciler.look()
    took_s = time.perf_counter() - started_s

    assert (first, second) == (0, 0)
    print(f"two looks at 20,000 batches: {took_s:.1f} s")
    assert took_s < 60


def test_a_look_asks_as_often_of_a_large_run_as_of_a_small_one(
    campaign: Campaign, clock: list[float]
) -> None:
    reconciler = reconciler_of(campaign)
    asked, num_asked = requests_of(campaign.store), []
    for number in range(3):
        for message in campaign.plan(*[prompts(f"{number}-{n}") for n in range(2)]):
            campaign.commit(message)
        campaign.plan(prompts(f"open {number}"))
        looks(reconciler, clock, 1)
        asked.clear()
        looks(reconciler, clock, 1)
        num_asked.append(len(asked))

    assert num_asked == [num_asked[0]] * 3
