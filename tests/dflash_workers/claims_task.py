"""The model's workers: from a hint to the commit, as tasks, generate, rollout and holds do it.

Called by claims_steps.py for each worker; yields what its task, its renewals and its requests that
are still on their way may do next, beside each other. A step is what nobody can come between: one
script, one request to S3. Looking a prompt up in the journal and starting it is one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.dflash_workers.claims_model import (
    GONE,
    HOLDER,
    NAMES,
    News,
    Rules,
    Step,
    Task,
    Worker,
    World,
    claim,
    clear,
    leave,
    release,
    renew,
    settle,
    with_commit,
    with_hint,
    with_task,
    with_worker,
)

HOLDING = frozenset({Task.LOAD, Task.ASK, Task.WORK, Task.RELOAD, Task.REASK, Task.RETRY})

MADE_AGAIN = "a holder makes again what was noted before it claimed"
UNTOLD = "a holder isn't told that its batch was cleared"
ROBBED = "a live holder's lease is taken away"
SECOND_COMMIT = "there is a second commit"
DANGLING = "a commit names a deleted object"


def worker_steps(world: World, me: int, rules: Rules) -> Iterator[Step]:
    """What this worker may do next."""
    worker = world.workers[me]
    yield from _BY_TASK[worker.doing](world, me, rules)
    if worker.doing in HOLDING:
        yield from _renew(world, me, rules)
    if worker.late_put:
        attempt = NAMES[me] if worker.late_put == "mine" else GONE
        wrong = DANGLING if worker.late_put == "deleted" else ""
        yield Step(NAMES[me], "has a late PUT arrive", with_commit(world, attempt), wrong)


def is_publishing(worker: Worker, rules: Rules) -> bool:
    """Whether a PUT of its commit may come next."""
    if worker.doing == Task.WORK:
        return worker.known == rules.all_prompts and not worker.running
    return worker.doing == Task.RETRY


def regained(world: World, me: int, rules: Rules) -> Worker:
    """The worker after a renewal that nobody refused, as far as the ghost is concerned."""
    worker = world.workers[me]
    if world.redis.lease or worker.doing == Task.RETRY:
        return worker
    return worker._replace(noted_before=_noted(world, rules))


def cleared(world: World, me: int, then: Task, rules: Rules) -> Step:
    """The worker's claim is cleared, because a commit stands."""
    redis = clear(world.redis, NAMES[me], rules)
    after = leave(world._replace(redis=redis, zombie_row=False), me, then)
    is_robbed = world.redis.lease == NAMES[1 - me] and redis.lease == ""
    return Step(NAMES[me], "clears", after, ROBBED if is_robbed else "")


def _renew(world: World, me: int, rules: Rules) -> Iterator[Step]:
    """The thread of the renewals. Whoever tries again to publish cares for LOST alone."""
    redis, answer = renew(world.redis, NAMES[me], rules)
    if answer == News.LOST:
        worker = world.workers[me]._replace(news=News.LOST)
    else:
        worker = regained(world, me, rules)
        if worker.doing != Task.RETRY and (answer == News.AGAIN or worker.in_doubt):
            worker = worker._replace(news=worker.news or News.AGAIN, in_doubt=False)
    after = with_worker(world._replace(redis=redis), me, worker)
    is_untold = answer == News.HELD and world.commit and not world.redis.deadline
    if after != world:
        yield Step(NAMES[me], f"renews: {answer}", after, UNTOLD if is_untold else "")


def _idle(world: World, me: int, _rules: Rules) -> Iterator[Step]:
    if world.num_queued:
        after = world._replace(num_queued=world.num_queued - 1)
        yield Step(NAMES[me], "receives the hint", with_task(after, me, Task.RECEIVED))


def _received(world: World, me: int, rules: Rules) -> Iterator[Step]:
    redis, answer = claim(world.redis, NAMES[me])
    if answer == News.LOST:
        yield Step(NAMES[me], "claims: held by another", leave(world, me, Task.IDLE))
        return
    worker = Worker(Task.LOAD, noted_before=_noted(world, rules))
    worker = worker._replace(late_put=world.workers[me].late_put)
    yield Step(NAMES[me], "claims", with_worker(world._replace(redis=redis), me, worker))


def _returning(world: World, me: int, _rules: Rules) -> Iterator[Step]:
    yield Step(NAMES[me], "returns the hint", with_hint(with_task(world, me, Task.IDLE)))


def _load(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield _look(world, me, 1, Task.ASK, rules)


def _ask(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield _look(world, me, 2, Task.WORK, rules)


def _reload(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield from _run(world, me, rules)
    yield _look(world, me, 1, Task.REASK, rules)


def _reask(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield from _run(world, me, rules)
    yield _look(world, me, 2, Task.WORK, rules)


def _look(world: World, me: int, number: int, then: Task, rules: Rules) -> Step:
    """The first or second of what follows a claim: the journal, then S3."""
    worker = world.workers[me]
    if (number == 1) == rules.the_journal_is_read_before_s3:
        noted = worker.known | world.redis.journal
        after = with_worker(world, me, worker._replace(doing=then, known=noted))
        if noted != world.redis.journal:  # rows that Redis lost, or never got
            after = _with_rows(after, me, noted)
        return Step(NAMES[me], "loads the journal", after)
    if world.commit and rules.s3_is_asked_after_a_claim:
        return Step(NAMES[me], "asks S3: committed", leave(world, me, Task.CLEAR))
    return Step(NAMES[me], "asks S3: no commit", with_task(world, me, then))


def _work(world: World, me: int, rules: Rules) -> Iterator[Step]:
    worker = world.workers[me]
    if is_publishing(worker, rules):
        yield from _publish(world, me, rules)
    else:
        yield from _run(world, me, rules)
    if worker.news == News.LOST:
        yield Step(NAMES[me], "hears that it lost", leave(world, me, Task.IDLE))
    elif worker.news == News.AGAIN:
        heard = worker._replace(doing=Task.RELOAD, news=News.NOTHING)
        yield Step(NAMES[me], "hears: again", with_worker(world, me, heard))


def _run(world: World, me: int, rules: Rules) -> Iterator[Step]:
    """Prompts start and end, whatever the batch's own thread is at."""
    worker, journal = world.workers[me], world.redis.journal
    for prompt in rules.prompts:
        if worker.running & prompt:
            yield Step(NAMES[me], "notes a prompt that ended", _note(world, me, prompt))
        elif worker.known & prompt:
            continue
        elif journal & prompt:
            found = worker._replace(known=worker.known | prompt)
            yield Step(NAMES[me], "finds a prompt noted", with_worker(world, me, found))
        else:
            is_sure = worker.doing == Task.WORK and not worker.news and not worker.in_doubt
            wrong = MADE_AGAIN if is_sure and worker.noted_before & prompt else ""
            started = worker._replace(running=worker.running | prompt)
            yield Step(NAMES[me], "starts a prompt", with_worker(world, me, started), wrong)


def _note(world: World, me: int, prompt: int) -> World:
    """The first row stands; a row of one who has lost the batch is as good as any."""
    worker, redis = world.workers[me], world.redis
    ended = worker._replace(known=worker.known | prompt, running=worker.running & ~prompt)
    return _with_rows(with_worker(world, me, ended), me, redis.journal | prompt)


def _with_rows(world: World, me: int, rows: int) -> World:
    redis = world.redis
    is_zombie = world.commit or redis.lease != NAMES[me]
    after = world._replace(redis=redis._replace(journal=rows))
    return after._replace(zombie_row=True) if is_zombie else after


def _noted(world: World, rules: Rules) -> int:
    """The prompts that were ever noted, but for those that a flush took."""
    return rules.all_prompts if world.commit else world.redis.journal


def _publish(world: World, me: int, rules: Rules) -> Iterator[Step]:
    """PUT data and commit; where a commit stands, read it, and delete the data it doesn't name."""
    name = NAMES[me]
    is_mine = world.commit in ("", name)
    if not rules.the_commit_is_conditional or world.commit == "":
        after = leave(with_commit(world, name), me, Task.CLEAR)
        yield Step(name, "commits", after, "" if is_mine else SECOND_COMMIT)
    elif is_mine and rules.data_stays_when_the_commit_names_it:
        yield Step(name, "finds its own commit", leave(world, me, Task.CLEAR))
    else:
        after = leave(world, me, Task.CLEAR)
        yield Step(name, "finds a commit, deletes its data", after, DANGLING if is_mine else "")


def _retry(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield from _publish(world, me, rules)
    worker = world.workers[me]
    if worker.news != News.LOST:
        return
    if rules.data_stays_when_the_lease_is_lost:
        yield Step(NAMES[me], "hears that it lost", leave(world, me, Task.IDLE))
    else:
        deleted = worker._replace(late_put=worker.late_put and "deleted")
        after = leave(with_worker(world, me, deleted), me, Task.IDLE)
        wrong = DANGLING if world.commit == NAMES[me] else ""
        yield Step(NAMES[me], "hears that it lost, deletes its data", after, wrong)


def _clear(world: World, me: int, rules: Rules) -> Iterator[Step]:
    yield cleared(world, me, Task.IDLE, rules)


def _release(world: World, me: int, rules: Rules) -> Iterator[Step]:
    redis, is_mine = release(world.redis, NAMES[me], rules)
    if is_mine:
        yield Step(NAMES[me], "releases", with_task(world._replace(redis=redis), me, Task.SEND))
    else:
        yield Step(NAMES[me], "has nothing to release", leave(world, me, Task.IDLE))


def _send(world: World, me: int, _rules: Rules) -> Iterator[Step]:
    yield Step(NAMES[me], "sends the hint", with_hint(with_task(world, me, Task.SETTLE)))


def _settle(world: World, me: int, rules: Rules) -> Iterator[Step]:
    # The broken release left lease and deadline as they were until now.
    deadline = f"release {NAMES[me]}" if rules.releasing_drops_the_lease_first else HOLDER
    redis = settle(world.redis, deadline, rules)
    yield Step(NAMES[me], "settles", leave(world._replace(redis=redis), me, Task.IDLE))


_BY_TASK: dict[Task, Callable[[World, int, Rules], Iterator[Step]]] = {
    Task.IDLE: _idle,
    Task.RECEIVED: _received,
    Task.RETURNING: _returning,
    Task.LOAD: _load,
    Task.ASK: _ask,
    Task.WORK: _work,
    Task.RELOAD: _reload,
    Task.REASK: _reask,
    Task.RETRY: _retry,
    Task.CLEAR: _clear,
    Task.RELEASE: _release,
    Task.SEND: _send,
    Task.SETTLE: _settle,
}
