"""Who makes and eats which microbatch."""

from __future__ import annotations

import itertools

import pytest

from dflash_workers.contract.errors import BadInput
from trainer.online.topology import Launch, Topology, TopologyRecipe, read_launch


@pytest.mark.parametrize(("targets", "drafters"), [*itertools.product((0, 1, 2, 3), (1, 2, 3))])
def test_each_microbatch_has_one_maker_and_one_eater_and_ranks_take_turns(
    targets: int, drafters: int
) -> None:
    topology = Topology(targets + drafters, TopologyRecipe(num_targets=targets))

    makers = [topology.sender(g) for g in range(12)]
    eaters = [topology.eater(g) for g in range(12)]

    assert eaters == [targets + g % drafters for g in range(12)]
    assert makers == ([g % targets for g in range(12)] if targets else eaters)
    for g in range(12):
        involved = {rank for rank in range(targets + drafters) if topology.is_mine(rank, g)}
        assert involved == {makers[g], eaters[g]}


@pytest.mark.parametrize("targets", [0, 1, 2])
def test_all_ranks_of_a_split_target_look_at_what_it_makes_and_one_rank_eats_it(
    targets: int,
) -> None:
    topology = Topology(8, TopologyRecipe(num_targets=targets, num_ranks_per_target=2))
    num_drafters = 8 - 2 * targets

    for g in range(24):
        eater = 2 * targets + g % num_drafters
        first = 2 * (g % targets) if targets else eater - eater % 2
        involved = {rank for rank in range(8) if topology.is_mine(rank, g)}
        assert topology.eater(g) == eater
        assert topology.sender(g) == (first if targets else eater)
        assert involved == {first, first + 1, eater}
    assert [list(ranks) for ranks in topology.targets()] == [
        [first, first + 1] for first in range(0, 2 * targets or 8, 2)
    ]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 5)])
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("per_step", [5, 10])
def test_bounded_sends_and_receives_in_order_never_deadlock(
    targets: int, drafters: int, room: int, per_step: int
) -> None:
    """Plays the ranks, with sends that arrive only when the other side has asked for them."""
    topology = Topology(targets + drafters, TopologyRecipe(num_targets=targets))
    total = 4 * per_step
    to_make = {t: [g for g in range(total) if topology.sender(g) == t] for t in range(targets)}
    to_eat = {
        d: [g for g in range(total) if topology.eater(g) == d] for d in topology.drafter_ranks
    }
    sent: set[int] = set()
    eaten: set[int] = set()

    for _ in range(10 * total):
        for target in range(targets):
            under_way = [g for g in to_make[target] if g in sent and g not in eaten]
            unsent = [g for g in to_make[target] if g not in sent]
            if unsent and len(under_way) < room:
                sent.add(unsent[0])
        for drafter in topology.drafter_ranks:
            step = min(g // per_step for g in range(total + 1) if g not in eaten)
            mine = [g for g in to_eat[drafter] if g not in eaten and g // per_step == step]
            if mine and mine[0] in sent:
                eaten.add(mine[0])

    assert len(eaten) == total


def test_a_division_that_leaves_nobody_to_train_or_nothing_to_do_is_refused() -> None:
    with pytest.raises(BadInput, match="for a drafter"):
        Topology(2, TopologyRecipe(num_targets=2))
    with pytest.raises(BadInput, match="for a drafter"):
        Topology(4, TopologyRecipe(num_targets=2, num_ranks_per_target=2))
    with pytest.raises(BadInput, match="targets of 2"):
        Topology(3, TopologyRecipe(num_ranks_per_target=2))
    with pytest.raises(BadInput, match="num_microbatches=3"):
        Topology(3, TopologyRecipe()).check_step(2)
    with pytest.raises(BadInput, match="in step"):
        Topology(2, TopologyRecipe(shard_drafter=True)).check_step(3)


def test_the_launcher_is_believed_or_refused_but_never_half_read() -> None:
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "29",
    }

    assert read_launch({}) == Launch()
    assert read_launch(environ) == Launch(3, 1, 4, 2, "h", 29)
    with pytest.raises(BadInput, match="torchrun"):
        read_launch({"RANK": "3"})
