"""Every order of steps and faults in the model of the claims, and what is wrong in any.

    python -m tests.dflash_workers.claims_search 2        with two faults, of any kind

Breadth first, so that the shortest way to each wrong is told; worlds that differ in names alone
are one. Beside what each step says of itself: a held batch is never pending; a batch is in one of
the two sets at most; from everywhere a commit can still come, without a reconciler too unless a
hint was lost; and after it Redis can get empty, but for a zombie's rows, which have a lifetime.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.dflash_workers.claims_model import (
    NAMES,
    SWEEPS,
    Offer,
    Redis,
    Rules,
    Step,
    Sweep,
    Task,
    World,
)
from tests.dflash_workers.claims_steps import RECONCILER, Fault, faults, steps

HELD_PENDING = "a held batch is pending"
IN_BOTH = "a batch is pending and in flight at once"
STUCK = "no commit can come any more"
STUCK_ALONE = "no commit can come without a reconciler, though no hint was lost"
LITTER = "claims of a committed batch stay"
LITTER_ROWS = "rows of a committed batch stay that a holder had noted"
STALE_PENDING = "a committed batch stays pending"


@dataclass(frozen=True, slots=True)
class Scope:
    """How far to look."""

    num_faults: int
    rules: Rules = field(default_factory=Rules)
    kinds: frozenset[Fault] = frozenset(Fault)
    num_sweeps: int = 1
    num_offers: int = 1  # the producer, then those who reconcile beside it
    until: str = ""  # this wrong is found: nobody needs the others


@dataclass
class Graph:
    """The worlds found so far. Faults lead to worlds, but are no edges: nobody may need one."""

    worlds: list[World] = field(default_factory=list)
    numbers: dict[World, int] = field(default_factory=dict)
    parents: array[int] = field(default_factory=lambda: array("l"))
    firsts: array[int] = field(default_factory=lambda: array("l"))  # first edge of each world
    edges: array[int] = field(default_factory=lambda: array("l"))  # twice its end, + 1: reconciler

    def add(self, world: World, parent: int) -> int:
        """The number of a world, new or known."""
        world = _canonical(world)
        number = self.numbers.setdefault(world, len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(world)
            self.parents.append(parent)
        return number


def search(scope: Scope) -> tuple[int, dict[str, list[str]]]:
    """How many worlds there are, and the shortest way to each wrong."""
    graph, wrongs = Graph(), dict[str, list[str]]()
    offers = (Offer.PLANNED, *[Offer.NOTHING] * (scope.num_offers - 1))
    sweeps = (Sweep.NOTHING,) * scope.num_sweeps
    graph.add(World(faults_left=scope.num_faults, offers=offers, sweeps=sweeps), 0)
    for number, world in enumerate(graph.worlds):  # which grow meanwhile
        graph.firsts.append(len(graph.edges))
        for wrong in _wrongs_of(world):
            wrongs.setdefault(wrong, _way_to(number, graph, scope))
        for step in steps(world, scope.rules):
            if step.wrong and step.wrong not in wrongs:
                way = _way_to(number, graph, scope)
                wrongs[step.wrong] = [*way, f"{step.who} {step.what}"]
            end = graph.add(step.world, number)
            graph.edges.append(2 * end + (step.who == RECONCILER))
        for fault in _faults(world, scope):
            graph.add(fault.world, number)
        if scope.until in wrongs:
            return len(graph.worlds), wrongs
    wrongs |= {wrong: _way_to(number, graph, scope) for wrong, number in _dead_ends(graph)}
    return len(graph.worlds), wrongs


def _faults(world: World, scope: Scope) -> Iterator[Step]:
    if world.faults_left:
        fewer = world._replace(faults_left=world.faults_left - 1)
        yield from (f for f in faults(fewer, scope.rules) if f.what in scope.kinds)


def _wrongs_of(world: World) -> Iterator[str]:
    redis = world.redis
    if redis.pending and redis.lease:
        yield HELD_PENDING
    if redis.pending and redis.deadline:
        yield IN_BOTH
    if redis.journal and not redis.pending and not world.zombie_row and _is_over(world):
        yield LITTER_ROWS


def _is_over(world: World) -> bool:
    """Committed, nothing going on, no claim in Redis: but perhaps rows, or pending."""
    return (
        world.commit != ""
        and world.redis[1:4] == Redis()[1:4]
        and not world.num_queued
        and all(worker.doing == Task.IDLE for worker in world.workers)
    )


def _dead_ends(graph: Graph) -> Iterator[tuple[str, int]]:
    """Worlds from where what must come can't come, the nearest of each kind."""
    everywhere = _marks(graph, lambda world: True)
    has_hints = _marks(graph, lambda world: not world.hint_lost)
    is_committed = _marks(graph, lambda world: world.commit != "")
    is_over = _marks(graph, _is_over)
    is_clean = _marks(graph, lambda world: _is_over(world) and not world.redis.pending)
    for wrong, must, goal, with_reconciler in (
        (STUCK, everywhere, is_committed, True),
        (STUCK_ALONE, has_hints, is_committed, False),
        (LITTER, is_committed, is_over, True),
        (STALE_PENDING, is_committed, is_clean, True),
    ):
        can = _backwards(graph, goal, with_reconciler=with_reconciler)
        stuck = (n for n in range(len(graph.worlds)) if must[n] and not can[n])
        if (number := next(stuck, None)) is not None:
            yield wrong, number


def _marks(graph: Graph, holds: Callable[[World], bool]) -> bytearray:
    return bytearray(map(holds, graph.worlds))


def _backwards(graph: Graph, goal: bytearray, *, with_reconciler: bool) -> bytearray:
    """The worlds that can reach the goal. Most ways lead to later numbers: few rounds do."""
    can, edges, has_changed = bytearray(goal), graph.edges, True
    bounds = [*graph.firsts, len(edges)]
    while has_changed:
        has_changed = False
        for number in range(len(can) - 1, -1, -1):
            if can[number]:
                continue
            for edge in edges[bounds[number] : bounds[number + 1]]:
                if can[edge >> 1] and (with_reconciler or not edge & 1):
                    can[number] = has_changed = True
                    break
    return can


def _canonical(world: World) -> World:
    """One world for all that differ in names alone."""
    first, second = world.workers
    if first >= second:
        renamed = _renamed(world, NAMES)._replace(workers=(second, first))
        world = renamed if first > second else min(world, renamed)
    if len(world.sweeps) > 1 and world.sweeps[0] >= world.sweeps[1]:
        renamed = _renamed(world, SWEEPS)._replace(sweeps=world.sweeps[::-1])
        world = renamed if world.sweeps[0] > world.sweeps[1] else min(world, renamed)
    if len(world.offers) > 1:
        world = world._replace(offers=tuple(sorted(world.offers)))
    return world


def _renamed(world: World, pair: str) -> World:
    swap = str.maketrans(pair, pair[::-1])
    redis = world.redis
    lease, deadline = redis.lease.translate(swap), redis.deadline.translate(swap)
    redis = redis._replace(lease=lease, deadline=deadline)
    return world._replace(redis=redis, commit=world.commit.translate(swap))


def _way_to(number: int, graph: Graph, scope: Scope) -> list[str]:
    """The steps to a world, gone once more by names that stay."""
    numbers = [number]
    while numbers[-1]:
        numbers.append(graph.parents[numbers[-1]])
    way, world = list[str](), graph.worlds[0]
    for child in numbers[-2::-1]:
        every = [*steps(world, scope.rules), *_faults(world, scope)]
        step = next(s for s in every if _canonical(s.world) == graph.worlds[child])
        way.append(f"{step.who} {step.what}".strip())
        world = step.world
    return way


if __name__ == "__main__":
    started = time.monotonic()
    num_worlds, found = search(Scope(num_faults=int(sys.argv[1])))
    for wrong, way in found.items():
        print(f"{wrong}:", *way, sep="\n    ")
    print(f"{num_worlds} worlds in {time.monotonic() - started:.0f} s, {len(found)} wrongs")
