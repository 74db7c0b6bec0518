"""The claims of one batch in small: all that Redis, S3 and two workers may look like.

A model of dflash_workers/claims.lua and of the script in contract/hints.py: the functions below
bear the verbs' names and are to be read beside them; test_claims_conform.py holds one against the
other. claims_task.py and claims_steps.py say who calls them when, and what may fail; then
claims_search.py goes through every order. Each rule of the protocol can be broken, so that the
search can show that it would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

NAMES = "AB"  # of the workers; as a value: the attempt that this worker is busy with
SWEEPS = "12"  # names of the sweeps, which know nothing of the tasks beside them
GONE = "gone"  # an attempt that nobody is busy with any more
HOLDER = "holder"  # sets the deadline by claiming or renewing
MAX_QUEUED = 2  # hints of this one batch that wait; more of them do what two do


class Task(StrEnum):
    """What a worker's task is doing. From LOAD to RETRY its claim is renewed."""

    IDLE = "idle"
    RECEIVED = "received"
    RETURNING = "returning"  # the hint, without having claimed
    LOAD = "load"
    ASK = "ask"
    WORK = "work"  # and, with every row, publish
    RELOAD = "reload"
    REASK = "reask"
    RETRY = "retry"  # to publish
    CLEAR = "clear"
    RELEASE = "release"
    SEND = "send"
    SETTLE = "settle"


class Offer(StrEnum):
    """What the producer, and whoever reconciles after it, does next."""

    NOTHING = ""
    PLANNED = "planned"
    MARKED = "marked"
    SUSPECTS = "suspects"
    CONVICTS = "convicts"
    SENDS = "sends"


class Sweep(StrEnum):
    """What a worker's sweep does next."""

    NOTHING = ""
    SEND = "send"
    SETTLE = "settle"


class News(StrEnum):
    """What a task hasn't read yet; also what a renewal answers."""

    NOTHING = ""
    HELD = "held"
    AGAIN = "again"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Rules:
    """The size of the batch, and what the protocol rests on: false is broken."""

    prompts: tuple[int, ...] = (1,)  # a bit each
    a_lease_lapses_with_its_deadline: bool = True
    renewing_tells_of_a_lapse: bool = True
    renewing_tells_of_a_clear: bool = True
    an_unanswered_renewal_counts_as_a_lapse: bool = True
    releasing_drops_the_lease_first: bool = True
    reaping_leaves_an_entry: bool = True
    settling_looks_at_the_deadline: bool = True
    clearing_leaves_anothers_lease: bool = True
    clearing_removes_the_journal: bool = True
    offering_spares_what_is_held: bool = True
    reconciling_offers_what_is_committed_but_pending: bool = True
    the_journal_is_read_before_s3: bool = True
    s3_is_asked_after_a_claim: bool = True
    the_commit_is_conditional: bool = True
    data_stays_when_the_lease_is_lost: bool = True
    data_stays_when_the_commit_names_it: bool = True

    @property
    def all_prompts(self) -> int:
        return sum(self.prompts)


class Redis(NamedTuple):
    """The batch's keys."""

    pending: bool = False
    deadline: str = ""  # whose entry in inflight: HOLDER, "reap 1", "release A"; "": none
    overdue: bool = False
    lease: str = ""  # whose attempt
    journal: int = 0  # rows, a bit per prompt


class Worker(NamedTuple):
    """A worker's task, and its renewals."""

    doing: Task = Task.IDLE
    known: int = 0  # prompts whose rows it has
    running: int = 0  # prompts that its engine answers
    news: News = News.NOTHING
    in_doubt: bool = False
    late_put: str = ""  # its commit on the way to S3: "mine", GONE, or of data "deleted"
    noted_before: int = 0  # a ghost: the prompts noted when it got the lease


class World(NamedTuple):
    """Everything, from the moment on when the batch is planned."""

    redis: Redis = Redis()
    num_queued: int = 0
    commit: str = ""  # whose attempt it names
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    sweeps: tuple[Sweep, ...] = (Sweep.NOTHING,)
    offers: tuple[Offer, ...] = (Offer.PLANNED,)
    faults_left: int = 0
    hint_lost: bool = False  # a ghost: a hint was lost, or all of Redis
    zombie_row: bool = False  # a ghost: a row was noted without the lease, or after the commit


class Step(NamedTuple):
    """What happens, what comes of it, and what is wrong with that."""

    who: str
    what: str
    world: World
    wrong: str = ""


def claim(redis: Redis, me: str) -> tuple[Redis, News]:
    if redis.lease not in ("", me):
        return redis, News.LOST
    return _hold(redis, me), News.HELD


def renew(redis: Redis, me: str, rules: Rules) -> tuple[Redis, News]:
    if redis.lease not in ("", me):
        return redis, News.LOST
    has_lapsed = redis.lease == "" and rules.renewing_tells_of_a_lapse
    is_cleared = redis.lease == me and redis.deadline == "" and rules.renewing_tells_of_a_clear
    return _hold(redis, me), News.AGAIN if has_lapsed or is_cleared else News.HELD


def release(redis: Redis, me: str, rules: Rules) -> tuple[Redis, bool]:
    if redis.lease != me:
        return redis, False
    if not rules.releasing_drops_the_lease_first:
        return redis, True
    return redis._replace(lease="", deadline=f"release {me}", overdue=False), True


def reap(redis: Redis, me: str, rules: Rules) -> Redis:
    deadline = f"reap {me}" if rules.reaping_leaves_an_entry else ""
    return redis._replace(deadline=deadline, overdue=False)


def settle(redis: Redis, deadline: str, rules: Rules) -> Redis:
    if redis.deadline != deadline and rules.settling_looks_at_the_deadline:
        return redis
    if not rules.releasing_drops_the_lease_first:
        redis = redis._replace(lease="")
    return redis._replace(deadline="", overdue=False, pending=True)


def clear(redis: Redis, me: str, rules: Rules) -> Redis:
    leaves_lease = redis.lease != me and rules.clearing_leaves_anothers_lease
    journal = 0 if rules.clearing_removes_the_journal else redis.journal
    return Redis(lease=redis.lease if leaves_lease else "", journal=journal)


def mark_pending(redis: Redis, rules: Rules) -> tuple[Redis, bool]:
    if (redis.lease or redis.deadline) and rules.offering_spares_what_is_held:
        return redis, False
    return redis._replace(pending=True), True


def lapse(redis: Redis) -> Redis:
    """Not a script but time: a lease, and the deadline set with it, are over."""
    return redis._replace(lease="", overdue=redis.deadline == HOLDER)


def _hold(redis: Redis, me: str) -> Redis:
    return redis._replace(lease=me, pending=False, deadline=HOLDER, overdue=False)


def with_worker(world: World, me: int, worker: Worker) -> World:
    other = world.workers[1 - me]
    return world._replace(workers=(other, worker) if me else (worker, other))


def with_task(world: World, me: int, task: Task) -> World:
    return with_worker(world, me, world.workers[me]._replace(doing=task))


def with_hint(world: World) -> World:
    return world._replace(num_queued=min(world.num_queued + 1, MAX_QUEUED))


def with_commit(world: World, attempt: str) -> World:
    """A commit stands: PUTs that arrive later change nothing."""
    first, second = (worker._replace(late_put="") for worker in world.workers)
    return world._replace(commit=attempt, workers=(first, second))


def leave(world: World, me: int, then: Task) -> World:
    """The worker forgets the batch, but for what a hand-over or a clear needs."""
    worker = world.workers[me]
    late_put = GONE if worker.late_put == "mine" else worker.late_put
    after = with_worker(world, me, Worker(then, late_put=late_put))
    if after.commit == NAMES[me]:
        after = after._replace(commit=GONE)
    if then in (Task.IDLE, Task.RETURNING) and after.redis.lease == NAMES[me]:
        after = after._replace(redis=after.redis._replace(lease=GONE))
    return after
