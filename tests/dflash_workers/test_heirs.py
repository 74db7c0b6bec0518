"""A dead worker's batch waits for no slot."""

from __future__ import annotations

from collections.abc import Callable

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import batch_name
from dflash_workers.heirs import MAX_HEIRS, Heirs
from dflash_workers.worker import Worker
from tests.batches import until
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt

MakeWorker = Callable[..., Worker]


def test_what_was_given_back_is_worked_on_at_once_and_committed(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine, hints: Hints
) -> None:
    (message,) = plan.add([prompt("say:inherited")])
    worker = make_worker()
    heirs = Heirs(worker.site)

    heirs.take_up(message.run, batch_name(0, message.batch))
    heirs.join(30)

    assert engine.asked == ["say:inherited"]
    assert hints.redis.zcard(hints.keys.inflight(message.run)) == 0


def test_a_worker_takes_up_no_more_than_its_share(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine
) -> None:
    messages = [plan.add([prompt(f"wait=0.6 {number}")])[0] for number in range(MAX_HEIRS + 1)]
    worker = make_worker()
    heirs = Heirs(worker.site)

    for message in messages:
        heirs.take_up(message.run, batch_name(message.segment, message.batch))
    until(lambda: engine.running == MAX_HEIRS)
    heirs.join(30)

    assert len(engine.asked) == MAX_HEIRS


def test_a_worker_that_is_leaving_takes_up_nothing_and_what_it_has_is_handed_over(
    plan: Plan, make_worker: MakeWorker, engine: FakeEngine, hints: Hints
) -> None:
    begun, other = (plan.add([prompt(f"wait=60 {number}")])[0] for number in range(2))
    worker = make_worker()
    heirs = Heirs(worker.site)
    heirs.take_up(begun.run, batch_name(begun.segment, begun.batch))
    until(lambda: engine.running == 1)

    worker.site.holds.drain()
    heirs.take_up(other.run, batch_name(other.segment, other.batch))
    heirs.join(10)

    assert len(engine.asked) == 1
    pending = hints.redis.zrange(hints.keys.pending(begun.run), 0, -1)
    assert batch_name(begun.segment, begun.batch).encode() in pending
