"""The model's steps: all that may come next, and all that may fail next.

Puts together what claims_task.py says of the workers with time, producer, reconciler and sweeps;
read by <- claims_search.py. A fault is never needed: whatever must come true has to come true
without another one. Time has no length here: what may lapse may lapse at any moment, but a live
holder's lease only by a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from tests.dflash_workers.claims_model import (
    NAMES,
    SWEEPS,
    News,
    Offer,
    Redis,
    Rules,
    Step,
    Sweep,
    Task,
    Worker,
    World,
    claim,
    lapse,
    leave,
    mark_pending,
    reap,
    release,
    renew,
    settle,
    with_commit,
    with_hint,
    with_worker,
)
from tests.dflash_workers.claims_task import (
    HOLDING,
    cleared,
    is_publishing,
    regained,
    worker_steps,
)

RECONCILER = "reconciler"


class Fault(StrEnum):
    """What may go wrong."""

    STALL = "STALLS: the lease lapses while it lives"
    CRASH = "CRASHES"
    DRAIN = "FAILS OR DRAINS"
    FLUSH = "FLUSHALL"
    HINT_LOST = "A HINT IS LOST"
    HINT_DOUBLED = "A HINT IS DOUBLED"
    UNANSWERED = "GETS NO ANSWER"
    LATE_PUT = "GETS NO ANSWER, ITS PUT IS STILL ON THE WAY"


def steps(world: World, rules: Rules) -> Iterator[Step]:
    """Everything that may come next."""
    yield from _time(world, rules)
    for at, offer in enumerate(world.offers):
        yield from _offer(world, at, offer, rules)
    for at, sweep in enumerate(world.sweeps):
        yield from _sweep(world, at, sweep, rules)
    for me in range(len(world.workers)):
        yield from worker_steps(world, me, rules)


def faults(world: World, rules: Rules) -> Iterator[Step]:
    """Everything that may fail next."""
    yield from _outer_faults(world)
    for me, worker in enumerate(world.workers):
        name = NAMES[me]
        if world.redis.lease == name:
            yield Step(name, Fault.STALL, world._replace(redis=lapse(world.redis)))
        if worker.doing in (Task.RECEIVED, Task.RETURNING):
            yield Step(name, Fault.CRASH, leave(world, me, Task.IDLE)._replace(hint_lost=True))
        elif worker.doing != Task.IDLE:
            yield Step(name, Fault.CRASH, leave(world, me, Task.IDLE))
        if worker.doing == Task.RECEIVED:
            yield Step(name, Fault.DRAIN, leave(world, me, Task.RETURNING))
        elif worker.doing in HOLDING - {Task.RELOAD, Task.REASK}:
            yield Step(name, Fault.DRAIN, leave(world, me, Task.RELEASE))
        if is_publishing(worker, rules) and not world.commit and not worker.late_put:
            late = _retrying(worker)._replace(late_put="mine")
            yield Step(name, Fault.LATE_PUT, with_worker(world, me, late))
        for after in _unanswered(world, me, rules):
            yield Step(name, Fault.UNANSWERED, after)


def _time(world: World, rules: Rules) -> Iterator[Step]:
    redis = world.redis
    if redis.lease not in ("", *NAMES):
        yield Step("a dead holder's lease", "lapses", world._replace(redis=lapse(redis)))
    is_unheld = not redis.lease or not rules.a_lease_lapses_with_its_deadline
    if redis.deadline and not redis.overdue and is_unheld:
        yield Step("the deadline", "is over", world._replace(redis=redis._replace(overdue=True)))


def _offer(world: World, at: int, offer: Offer, rules: Rules) -> Iterator[Step]:
    """What is planned, and what two looks of a reconciler found lost."""
    is_done = world.commit and not (
        world.redis.pending and rules.reconciling_offers_what_is_committed_but_pending
    )
    is_lost = not (is_done or world.redis.deadline or world.num_queued)
    redis, is_marked = mark_pending(world.redis, rules)
    marked = world._replace(redis=redis)
    match offer:
        case Offer.PLANNED:
            then = Offer.MARKED if is_marked else Offer.NOTHING
            yield Step("producer", "marks it pending", _with_offer(marked, at, then))
        case Offer.MARKED:
            then = Offer.NOTHING
            yield Step("producer", "sends the hint", with_hint(_with_offer(world, at, then)))
        case Offer.NOTHING:
            if is_lost:
                yield Step(RECONCILER, "suspects", _with_offer(world, at, Offer.SUSPECTS))
        case Offer.SUSPECTS:
            then = Offer.CONVICTS if is_lost else Offer.NOTHING
            yield Step(RECONCILER, "looks again", _with_offer(world, at, then))
        case Offer.CONVICTS:
            then = Offer.SENDS if is_marked else Offer.NOTHING
            yield Step(RECONCILER, "marks it pending", _with_offer(marked, at, then))
        case Offer.SENDS:
            then = Offer.NOTHING
            yield Step(RECONCILER, "sends the hint", with_hint(_with_offer(world, at, then)))


def _sweep(world: World, at: int, sweep: Sweep, rules: Rules) -> Iterator[Step]:
    who = f"sweep {SWEEPS[at]}"
    match sweep:
        case Sweep.NOTHING:
            if world.redis.overdue:
                redis = reap(world.redis, SWEEPS[at], rules)
                reaped = _with_sweep(world._replace(redis=redis), at, Sweep.SEND)
                yield Step(who, "reaps", reaped)
        case Sweep.SEND:
            yield Step(who, "sends the hint", with_hint(_with_sweep(world, at, Sweep.SETTLE)))
        case Sweep.SETTLE:
            redis = settle(world.redis, f"reap {SWEEPS[at]}", rules)
            settled = _with_sweep(world._replace(redis=redis), at, Sweep.NOTHING)
            yield Step(who, "settles", settled)


def _outer_faults(world: World) -> Iterator[Step]:
    """What hits Redis, hints, sweeps, and whoever offers."""
    if world.num_queued:
        fewer = world._replace(num_queued=world.num_queued - 1, hint_lost=True)
        yield Step("", Fault.HINT_LOST, fewer)
        yield Step("", Fault.HINT_DOUBLED, with_hint(world))
    for at, sweep in enumerate(world.sweeps):
        if sweep:
            who = f"sweep {SWEEPS[at]}"
            yield Step(who, Fault.CRASH, _with_sweep(world, at, Sweep.NOTHING))
    for at, offer in enumerate(world.offers):
        died = _with_offer(world, at, Offer.NOTHING)
        if offer in (Offer.PLANNED, Offer.MARKED):
            yield Step("producer", Fault.CRASH, died._replace(hint_lost=True))
        elif offer == Offer.SENDS:
            yield Step(RECONCILER, Fault.CRASH, died)
    first, second = (worker._replace(noted_before=0) for worker in world.workers)
    empty = world._replace(redis=Redis(), num_queued=0, hint_lost=True, zombie_row=False)
    yield Step("", Fault.FLUSH, empty._replace(workers=(first, second)))


def _unanswered(world: World, me: int, rules: Rules) -> Iterator[World]:
    """Redis or S3 did as it was told, or didn't, and this worker heard nothing of it."""
    name, worker, task = NAMES[me], world.workers[me], world.workers[me].doing
    if task in HOLDING:
        redis, answer = renew(world.redis, name, rules)
        after = worker if answer == News.LOST else regained(world, me, rules)
        doubts = rules.an_unanswered_renewal_counts_as_a_lapse and task != Task.RETRY
        after = after._replace(in_doubt=doubts or worker.in_doubt)
        yield with_worker(world._replace(redis=redis), me, after)
    if task == Task.RECEIVED:
        redis, answer = claim(world.redis, name)
        if answer == News.HELD:
            yield world._replace(redis=redis)  # claims once more
            yield leave(world._replace(redis=redis), me, Task.RETURNING)  # gives up
    if task in (Task.WORK, Task.RELOAD, Task.REASK):
        yield from _away(world, me, rules)
    if is_publishing(worker, rules) and not world.commit:
        yield with_worker(with_commit(world, name), me, _retrying(worker))
    if task == Task.CLEAR:
        yield cleared(world, me, Task.CLEAR, rules).world  # clears once more
    if task == Task.RELEASE:
        redis, is_mine = release(world.redis, name, rules)
        if is_mine:  # releases once more, and hears that it isn't
            yield leave(world._replace(redis=redis), me, Task.IDLE)


def _away(world: World, me: int, rules: Rules) -> Iterator[World]:
    """The journal pauses; or the looks that are due after "again" are put off."""
    worker = world.workers[me]
    for prompt in rules.prompts:
        if worker.running & prompt:
            known, running = worker.known | prompt, worker.running & ~prompt
            yield with_worker(world, me, worker._replace(known=known, running=running))
    if worker.doing in (Task.RELOAD, Task.REASK):
        yield with_worker(world, me, worker._replace(doing=Task.WORK, in_doubt=True))


def _retrying(worker: Worker) -> Worker:
    return Worker(Task.RETRY, news=News.LOST if worker.news == News.LOST else News.NOTHING)


def _with_offer(world: World, at: int, offer: Offer) -> World:
    return world._replace(offers=(*world.offers[:at], offer, *world.offers[at + 1 :]))


def _with_sweep(world: World, at: int, sweep: Sweep) -> World:
    return world._replace(sweeps=(*world.sweeps[:at], sweep, *world.sweeps[at + 1 :]))
